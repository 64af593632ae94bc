"""Which compiled kernels this process has, if any: they are made or found at the first question, and proved right.

Knows where a user's caches are; knows nothing of what the kernels are for.
"""

import logging
import os
from functools import cache

import torch
from torch import Tensor

from model_shards.built_in import cache_folder
from model_shards.cpu_kernels.build import BuildRefused, built_library, find_compiler
from model_shards.cpu_kernels.kernels import CpuKernels
from model_shards.cpu_kernels.probe import wrong_function

_log = logging.getLogger(__name__)


@cache
def cpu_kernels() -> CpuKernels | None:
    """Those of this machine, compiled if need be. None where there are none; the reason is in the log."""
    try:
        compiler = find_compiler(os.environ)
        kernels = CpuKernels(built_library(cache_folder().parent / "cpu-kernels", compiler))
        wrong = wrong_function(kernels)
        if wrong is not None:
            raise BuildRefused(f"{wrong}, as {compiler} made it, is not right")
    except (BuildRefused, OSError, AttributeError, RuntimeError) as error:  # RuntimeError: there is no home folder
        _log.warning("torch's own operations instead of compiled ones, which are faster: %s", error)
        return None
    _log.info("compiled operations between the matrix products, by %s", compiler)
    return kernels


def kernels_for(tensor: Tensor) -> CpuKernels | None:
    """The kernels where they take such a tensor."""
    return cpu_kernels() if tensor.is_cpu and tensor.dtype is torch.float32 else None

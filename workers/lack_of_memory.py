"""Running out of memory as one error with the numbers, whoever says so: Python, torch, CUDA or the kernel.

Knows the ways in which an allocation fails; knows nothing of what was to be allocated, and loads no torch.
"""

import errno
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from workers.config import Device
from workers.device import free_memory
from workers.errors import OutOfMemory, WorkerError

# In messages of torch, its allocators, oneDNN and C++, which all raise a plain RuntimeError.
_SAID = re.compile(r"(can't|cannot) allocate|not enough memory|out of memory|bad_alloc", re.IGNORECASE)
_LIMITS = {"ulimit -v": resource.RLIMIT_AS, "ulimit -d": resource.RLIMIT_DATA}


@contextmanager
def memory_for(what: str, device: Device) -> Iterator[None]:
    """Raises `OutOfMemory` in place of whatever says, within this block, that there is no memory for `what`."""
    try:
        yield
    except WorkerError:
        raise  # it has its own words
    except (MemoryError, RuntimeError, OSError) as error:
        if not _lacks_memory(error):
            raise
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise OutOfMemory(
            f"no memory for {what}: {said}; {free_memory(device)} bytes are free on {device}{_own_limits()}"
        ) from error


def _lacks_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or _SAID.search(str(error)) is not None


def _own_limits() -> str:
    """A process may be allowed less than what is free."""
    limits = {name: resource.getrlimit(kind)[0] for name, kind in _LIMITS.items()}
    return "".join(
        f", {limit} bytes are allowed to the process ({name})"
        for name, limit in limits.items()
        if limit != resource.RLIM_INFINITY
    )

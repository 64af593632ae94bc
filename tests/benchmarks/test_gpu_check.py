"""scripts/gpu-check end to end in its small form on a CPU, and that it loads what a bare GPU machine has."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)  # the script gives itself six minutes

PROJECT = Path(__file__).resolve().parents[2]
ABSENT = ("ray", "zmq", "gguf", "fastapi", "pydantic", "tokenizers", "huggingface_hub")


def test_the_small_form_passes_on_a_cpu() -> None:
    command = [str(PROJECT / "scripts" / "gpu-check"), "--device", "cpu", "--small"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "blocks of 256, window 100: greatest difference",
        "right: all_reduce, all_gather, broadcast, captured all_reduce; aborted and closed",
        "7 rows replayed",
        "decode of   8",
        "of the bandwidth",
        "prefill of 64",
        "of the rate of matrix products",
        "ms in kernels",
        "passed",
    ):
        assert words in done.stdout, words


def test_without_a_gpu_it_says_how_to_run_without_one() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check"]
    done = subprocess.run(
        command,
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""},
    )
    assert done.returncode == 1
    assert "torch sees no GPU here; --device cpu --small" in done.stderr


def test_it_loads_nothing_that_a_machine_for_gpu_tests_lacks() -> None:
    program = (
        "import sys\n"
        f"for name in {ABSENT!r}:\n"
        "    sys.modules[name] = None\n"
        "import benchmarks.gpu_check\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'cluster']\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr

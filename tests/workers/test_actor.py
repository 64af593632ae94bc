"""The Ray actor around a worker is known without torch; tests/system/test_actor.py has it run."""

import subprocess
import sys

DEADLINE_S = 100.0


def test_the_class_can_be_had_without_torch() -> None:
    code = "import sys, workers.actor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S, check=False).returncode == 0

"""Libraries draw nothing on the screen of whoever starts a worker."""

import subprocess
import sys

import pytest

SCRIPT = """
import {module}
from tqdm.auto import tqdm
assert tqdm([0]).disable
"""


@pytest.mark.parametrize("module", ["model_worker.worker", "model_worker.__main__", "model_worker.rpc.server"])
def test_progress_bars_of_libraries_are_off(module: str) -> None:
    finished = subprocess.run([sys.executable, "-c", SCRIPT.format(module=module)], capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (0, "")

import tempfile
from pathlib import Path
from typing import Final

MEMORY: Final = Path("/dev/shm")


def folder_in_memory() -> "tempfile.TemporaryDirectory[str]":
    """A folder that takes no time of a device, where the machine has such; it goes with the object."""
    return tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)

"""The process that runs the model, and the engine as a library: ``LocalClient`` and ``AsyncLocalClient``.

Importing this package before torch sets how long OpenMP threads spin at a barrier:
with the default, a second busy process on the same cores makes a decode step thirty
times slower (the spinning thread takes the core its partner waits for).
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Read when the libraries are imported, by whichever module imports them first.
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

if TYPE_CHECKING:
    from model_worker.local import AsyncLocalClient as AsyncLocalClient
    from model_worker.local import LocalClient as LocalClient

__all__ = ["AsyncLocalClient", "LocalClient"]


def __getattr__(name: str) -> object:
    """Load a public name at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("model_worker.local"), name)

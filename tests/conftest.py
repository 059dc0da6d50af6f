"""A tiny model for whoever needs one, written once a session, and workers built on it."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

import model_worker  # noqa: F401 -- before torch: it bounds the spinning of torch's threads

if TYPE_CHECKING:
    from model_worker.worker import Worker

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model in transformers' format."""
    from tests.fakes.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def load_once() -> Callable[..., Any]:
    """``loading.load`` with a memory: what it loads is not changed by those who use it."""
    from model_worker.models import loading

    return cache(loading.load)


@pytest.fixture(scope="session")
def qualified_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's workers remember which models are qualified."""
    return tmp_path_factory.mktemp("qualified")


@pytest.fixture
def tiny_settings(tiny_folder: Path) -> dict[str, Any]:
    """Settings on the tiny model: fp32, blocks of 8 tokens, 4 sequences, one thread, room for 256 blocks."""
    return {
        "model": str(tiny_folder),
        "device": "cpu",
        "dtype": "float32",
        "block_size": 8,
        "max_num_seqs": 4,
        "l1_bytes": 1 << 20,
        "num_threads": 1,
    }


@pytest.fixture
def build_tiny(
    tiny_settings: dict[str, Any],
    qualified_folder: Path,
    load_once: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., "Worker"]]:
    """Builds a worker by the tiny settings, with changes."""
    import torch

    from model_worker import worker
    from model_worker.config import WorkerSettings

    monkeypatch.setattr(worker, "load", load_once)
    monkeypatch.setattr(worker, "qualified_folder", lambda: qualified_folder)
    monkeypatch.setattr(worker, "digest_folder", lambda: qualified_folder / "digests")
    num_threads = torch.get_num_threads()

    def build(*, observe_logits: Any = None, store: Any = None, **changes: Any) -> "Worker":
        settings = WorkerSettings(**tiny_settings | changes)
        return worker.build(settings, observe_logits=observe_logits, store=store)

    yield build
    torch.set_num_threads(num_threads)

"""A worker whose engine fails ends, so that whoever watches it starts another."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from model_worker.__main__ import serve
from model_worker.config import WorkerSettings
from model_worker.worker import Worker
from prefixcache.errors import InternalError


async def test_a_worker_whose_loop_fails_stops_serving(
    build_tiny: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = build_tiny()

    def fail(*_: Any) -> None:
        raise RuntimeError("a bug of the loop")

    await worker.engine.start()
    serving = asyncio.create_task(serve(worker, WorkerSettings(listen="127.0.0.1:0")))
    for _ in range(3_000):
        if "ready" in capsys.readouterr().out:
            break
        await asyncio.sleep(0.01)
    monkeypatch.setattr(worker.engine._loop._endings, "reap", fail)
    worker.engine._loop._wake.set()
    with pytest.raises(InternalError, match="start the worker again"):
        async with asyncio.timeout(30):
            await serving
    await worker.engine.stop(grace_s=0.0)

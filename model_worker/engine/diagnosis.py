"""What a worker knows of itself and of the machine; measurements run between the engine's own operations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from model_worker.engine.model_thread import ModelThread
from prefixcache.errors import CapacityExceeded, EngineStopped

if TYPE_CHECKING:
    from model_worker.models.measuring import Measurement, Meter

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What was found at start; fields as in ``DiagnoseResponse``."""

    checks: dict[str, str]
    is_remembered: bool
    row_counts: tuple[int, ...]
    canary_digest: str
    memory_plan_bytes: dict[str, int]
    available_bytes: int
    versions: dict[str, str]
    machine: dict[str, str]
    startup_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer to ``Diagnose``; ``measurement`` is None where none was asked for."""

    facts: WorkerFacts
    resident_bytes: int
    num_running: int
    load_average: float
    measurement: Measurement | None = None


class MeasuringRoom:
    """Lets one measurement run at a time, piece by piece. Called on the engine's loop."""

    def __init__(self, thread: ModelThread, new_meter: Callable[[], Meter]) -> None:
        self._thread = thread
        self._new_meter = new_meter
        self._lock = asyncio.Lock()
        self._is_closed = False

    async def measure(self) -> Measurement:
        """Run one measurement; CapacityExceeded while another runs, EngineStopped where the worker stops meanwhile."""
        if self._lock.locked():
            raise CapacityExceeded(
                "another measurement is running; try again in some seconds, or ask without measuring"
            )
        async with self._lock:
            meter = await self._run(self._new_meter)
            for piece in meter.pieces():
                await self._run(piece)
            return await self._run(meter.result)

    async def close(self) -> None:
        """End the measurement under way after its present piece, and take no more."""
        self._is_closed = True
        async with self._lock:
            return

    async def _run(self, piece: Callable[[], Result]) -> Result:
        if self._is_closed:
            raise EngineStopped("the worker is stopping; ask another worker or try again later")
        return await self._thread.run(piece)

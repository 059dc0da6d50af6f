"""Sequences for tests of bookkeeping: without a sampler, a slot or a prompt that matters."""

from model_worker.engine.canonical import CanonicalRun
from model_worker.engine.request import GenerateRequest
from model_worker.engine.sequence import Sequence


def sequence(name: str, *, priority: int = 0, arrived_at: float = 0.0) -> Sequence:
    request = GenerateRequest(name, [1], priority=priority)
    return Sequence(request, CanonicalRun([1], b"\1\0\0\0", bytes(32)), arrived_at=arrived_at)


def names(sequences: list[Sequence]) -> list[str]:
    return [each.request.request_id for each in sequences]

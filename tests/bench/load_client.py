"""Who sends a load: the SDK on a loop of its own thread or process, or a reader of the engine's own stream."""

import asyncio
import multiprocessing
import os
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from model_worker.engine.engine import Engine
from model_worker.engine.request import GenerateRequest, StopConditions, TokensGenerated
from prefixcache import AsyncClient
from tests.bench.timeline import Timeline

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts that are sent at once, each for ``num_tokens`` tokens, greedily, whatever they are."""

    prompts: list[list[int]]
    num_tokens: int


class Clients:
    """Sends loads from one thread, here or in another process; ``placement`` says which."""

    def __init__(self, executor: Executor, placement: str) -> None:
        self.placement = placement
        self._executor = executor

    def send(self, address: str, load: Load) -> Timeline:
        """Send a load to the worker at ``address`` over gRPC."""
        return self._executor.submit(_send_now, address, load).result()


@contextmanager
def clients_in(place: str, *, cpus: list[int]) -> Iterator[Clients]:
    """Clients in a ``thread`` of this process or in a ``process`` that runs on ``cpus`` alone; none: on all."""
    if place == "thread":
        with ThreadPoolExecutor(1, thread_name_prefix="clients") as thread:
            yield Clients(thread, "one loop on a thread of the worker's process")
        return
    context = multiprocessing.get_context("spawn")
    where = f"CPU {', '.join(map(str, cpus))}" if cpus else "any CPU"
    with ProcessPoolExecutor(1, mp_context=context, initializer=_stay_on, initargs=(cpus,)) as process:
        yield Clients(process, f"one loop in a process of its own on {where}")


async def own_stream(engine: Engine, load: Load) -> Timeline:
    """The same load as the engine answers it, read on the engine's loop."""
    begin = time.perf_counter()
    return Timeline(
        await asyncio.gather(*(_own_arrivals(engine, prompt, load.num_tokens, begin) for prompt in load.prompts))
    )


def _stay_on(cpus: list[int]) -> None:
    if cpus:
        os.sched_setaffinity(0, cpus)


def _send_now(address: str, load: Load) -> Timeline:
    return asyncio.run(_send(address, load))


async def _send(address: str, load: Load) -> Timeline:
    async with AsyncClient(address, timeout=TIMEOUT_S, retries=0) as client:
        await client.ping()
        begin = time.perf_counter()
        return Timeline(
            await asyncio.gather(*(_arrivals(client, prompt, load.num_tokens, begin) for prompt in load.prompts))
        )


async def _arrivals(client: AsyncClient, prompt: list[int], num_tokens: int, begin: float) -> list[float]:
    arrivals: list[float] = []
    async for chunk in client.stream(prompt, max_new_tokens=num_tokens, ignore_eos=True):
        arrivals += [time.perf_counter() - begin] * len(chunk.token_ids)
    return arrivals


async def _own_arrivals(engine: Engine, prompt: list[int], num_tokens: int, begin: float) -> list[float]:
    stopping = StopConditions(max_new_tokens=num_tokens, ignore_eos=True)
    arrivals: list[float] = []
    async for event in engine.generate(GenerateRequest(uuid.uuid4().hex, prompt, stopping=stopping)):
        if isinstance(event, TokensGenerated):
            arrivals += [time.perf_counter() - begin] * len(event.token_ids)
    return arrivals

"""Callers that leave, dawdle or come in thousands: nobody else is harmed, and nothing is left behind."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, suppress

import psutil
import pytest

from model_worker import worker as composition
from model_worker.rpc.server import Server
from prefixcache import AsyncClient
from prefixcache.errors import EngineStopped
from tests.engine.driver import random_prompt
from tests.fakes.fake_engine import FakeEngine
from tests.rpc.real_worker import RealWorker, real_worker
from tests.rpc.wire import connect, is_served, until

Build = Callable[..., composition.Worker]

NUM_CALLS = 1_000
NUM_AT_ONCE = 50
MAX_GROWTH_BYTES = 64 << 20


def any_call(client: AsyncClient, draw: random.Random) -> Awaitable[object]:
    """A call that takes a while: most often a generation, of a prompt that others share in part."""
    prompt = random_prompt(draw.randrange(1, 200), seed=draw.randrange(3))
    kind = draw.random()
    if kind < 0.1:
        return client.warm(prompt)
    if kind < 0.2:
        return client.tokenize("the and in " * 2_000)
    salt = draw.choice(["", "a"])
    return client.generate(prompt, max_new_tokens=draw.randrange(1, 100), ignore_eos=True, cache_salt=salt)


async def come_and_go(client: AsyncClient, draw: random.Random) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(any_call(client, draw), draw.random() * 0.5)


async def test_a_thousand_calls_that_end_at_random_moments_leave_nothing(build_tiny: Build) -> None:
    draw = random.Random(11)
    async with real_worker(build_tiny, l1_bytes=40 * 4096, max_waiting=NUM_AT_ONCE) as worker:
        for _ in range(2):
            await asyncio.gather(*(come_and_go(worker.client, draw) for _ in range(NUM_AT_ONCE)))
        await worker.comes_to_rest()
        before_bytes, num_tasks = psutil.Process().memory_info().rss, len(asyncio.all_tasks())
        for _ in range(NUM_CALLS // NUM_AT_ONCE):
            await asyncio.gather(*(come_and_go(worker.client, draw) for _ in range(NUM_AT_ONCE)))
        await worker.comes_to_rest()
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks)
        assert psutil.Process().memory_info().rss - before_bytes < MAX_GROWTH_BYTES
        requests = worker.driver.engine.stats().requests
        assert requests.received == requests.finished + requests.cancelled
        assert requests.finished > 0
        assert requests.cancelled > NUM_CALLS // 20
        assert set(worker.failed_calls) == {"CANCELLED"}


async def read_slowly(worker: RealWorker, may_hurry: asyncio.Event) -> int:
    """Read an answer at one message a second until it may hurry; the number of its tokens."""
    num_tokens = 0
    async for chunk in worker.client.stream("slow", max_new_tokens=450, ignore_eos=True, logprobs=20):
        num_tokens += len(chunk.token_ids)
        with suppress(TimeoutError):
            await asyncio.wait_for(may_hurry.wait(), 1.0)
    return num_tokens


async def test_a_reader_of_one_message_a_second_slows_nobody_and_holds_no_slot(build_tiny: Build) -> None:
    may_hurry = asyncio.Event()
    async with real_worker(build_tiny) as worker:
        expected = await worker.client.generate("others", max_new_tokens=30, ignore_eos=True)
        slow = asyncio.create_task(read_slowly(worker, may_hurry))
        engine = worker.driver.engine
        await until(lambda: engine.stats().requests.received == 2)
        for _ in range(5):
            answer = await worker.client.generate("others", max_new_tokens=30, ignore_eos=True)
            assert answer.token_ids == expected.token_ids
        await until(lambda: engine.stats().requests.finished == 7)
        assert worker.driver.gauges.num_running == 0
        assert not slow.done(), "the slow reader was not slow"
        may_hurry.set()
        assert await slow == 450


async def test_one_that_never_reads_is_bounded_by_its_own_answer(build_tiny: Build) -> None:
    async with real_worker(build_tiny) as worker:
        streams = [worker.client.stream("x", max_new_tokens=450, ignore_eos=True, logprobs=20) for _ in range(4)]
        for stream in streams:
            await anext(stream)
        engine = worker.driver.engine
        await until(lambda: engine.stats().requests.finished == 4)
        assert (await worker.client.generate("other", max_new_tokens=3)).token_ids
        for stream in streams:
            await stream.aclose()


@pytest.fixture
async def address(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """Where a server is that takes three connections."""
    monkeypatch.setattr("model_worker.rpc.server.most_connections", lambda: 3)
    server = Server(FakeEngine(), listen="127.0.0.1:0")
    yield await server.start()
    await server.stop(0)


async def test_connections_beyond_the_bound_are_closed_at_once_and_others_live_on(address: str) -> None:
    async with AsyncClient(address, timeout=10, retries=0) as early:
        await early.ping()
        with ExitStack() as stack:
            others = [stack.enter_context(connect(address)) for _ in range(5)]
            served = [await asyncio.to_thread(is_served, other) for other in others]
            assert served.count(True) == 2
            assert await early.ping() < 5


async def test_a_client_beyond_the_bound_is_told_and_served_when_others_have_gone(address: str) -> None:
    with ExitStack() as stack:
        others = [stack.enter_context(connect(address)) for _ in range(3)]
        assert all([await asyncio.to_thread(is_served, other) for other in others])
        async with AsyncClient(address, timeout=10, retries=0) as late:
            with pytest.raises(EngineStopped, match=f"no worker answers at {address}"):
                await late.ping()
    async with AsyncClient(address, timeout=10, retries=8) as later:
        assert await later.ping() < 5

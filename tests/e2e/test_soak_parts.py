"""The soak's own parts: what it sends, how it counts what comes back, what it judges."""

import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import islice

import pytest

from prefixcache.client import AsyncClient, WorkerStats
from prefixcache.client.options import GenerateOptions
from prefixcache.errors import CapacityExceeded, DeadlineExceeded, InternalError, PrefixCacheError, RequestCancelled
from prefixcache.load.conversation import Answer
from prefixcache.load.token_source import TokenSource
from tests.bench.soak.aftermath import Comparison, compare_alone
from tests.bench.soak.judgement import Findings, bounds_for, growth_mb_per_min, judge
from tests.bench.soak.load import SoakRequest, soak_load
from tests.bench.soak.target import FINISHED, LEFT, OVERDUE, REFUSED, Kept, SoakTarget
from tests.bench.soak.watch import Reading
from tests.fakes.recording_servicer import RecordingServicer, finished_stream, serving

GREEDY = SoakRequest("hi", 2, options=GenerateOptions(max_new_tokens=2))
HURRIED = replace(GREEDY, options=GenerateOptions(max_new_tokens=2, timeout=30.0))


def requests(num_conversations: int, *, seed: int) -> list[SoakRequest]:
    """The first request of each conversation."""
    source = TokenSource(49_152, seed=seed)
    firsts = [next(conversation) for conversation in islice(soak_load(source, seed=seed), num_conversations)]
    return [request for request in firsts if isinstance(request, SoakRequest)]


def test_a_load_depends_on_its_seed_alone() -> None:
    assert requests(50, seed=1) == requests(50, seed=1)
    assert requests(50, seed=1) != requests(50, seed=2)


def test_a_load_asks_for_everything_a_request_may_ask_for() -> None:
    load = requests(300, seed=0)
    assert {type(request.prompt[0]) for request in load} == {int, str, dict}
    options = {name for request in load for name in request.options}
    assert options >= {"timeout", "priority", "bypass_prefix_cache", "n", "temperature", "seed"}
    assert any(request.leaves_after_tokens for request in load)
    assert any(request.leaves_after_s is not None for request in load)


def test_a_chat_goes_on_with_its_answers() -> None:
    load = soak_load(TokenSource(49_152, seed=0), seed=0)
    chats = 0
    for conversation in islice(load, 40):
        first = next(conversation)
        try:
            second = conversation.send(Answer((1, 2, 3), "", 0, 0))
        except StopIteration:
            continue
        assert second.prompt[: len(first.prompt) + 3] == (*first.prompt, 1, 2, 3)
        chats += 1
    assert chats


@pytest.fixture
def servicer() -> RecordingServicer:
    return RecordingServicer()


@pytest.fixture
async def address(servicer: RecordingServicer) -> AsyncIterator[str]:
    async with serving(servicer) as address:
        yield address


async def sent(address: str, *requests: SoakRequest, num_kept: int = 5) -> SoakTarget:
    """What came of requests sent one after another."""
    async with SoakTarget(address, num_kept=num_kept, rng=random.Random(0)) as target:
        for request in requests:
            try:
                await target.send(request, lambda _number: None)
            except PrefixCacheError:
                continue
    return target


@pytest.mark.parametrize(
    ("request_", "script", "outcome"),
    [
        (GREEDY, finished_stream("a", "b"), FINISHED),
        (GREEDY, CapacityExceeded("full"), REFUSED),
        (HURRIED, DeadlineExceeded("late"), OVERDUE),
        (replace(GREEDY, leaves_after_tokens=1), [*finished_stream("a", "b")[:2], 60.0], LEFT),
        (replace(GREEDY, leaves_after_s=0.05), 60.0, LEFT),
    ],
)
async def test_what_had_to_be_expected_is_no_error(
    servicer: RecordingServicer, address: str, request_: SoakRequest, script: object, outcome: str
) -> None:
    servicer.script("Generate", script)  # type: ignore[arg-type]
    target = await sent(address, request_)
    assert (target.outcomes, target.errors) == ({outcome: 1}, {})


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (InternalError("a fault"), "INTERNAL"),
        (DeadlineExceeded("nobody set one"), "DEADLINE_EXCEEDED"),
        (RequestCancelled("nobody asked for it"), "CANCELLED"),
        (finished_stream("a"), "INCOMPLETE"),
    ],
)
async def test_anything_else_is_one(servicer: RecordingServicer, address: str, script: object, name: str) -> None:
    servicer.script("Generate", script)  # type: ignore[arg-type]
    target = await sent(address, GREEDY)
    assert (target.outcomes, target.errors) == ({}, {name: 1})
    assert target.first_error.startswith(f"{name}: ")
    assert not target.kept


async def test_greedy_answers_are_kept_as_a_bounded_sample(servicer: RecordingServicer, address: str) -> None:
    servicer.script("Generate", finished_stream("a", "b"))
    drawn = replace(GREEDY, options=GenerateOptions(max_new_tokens=2, temperature=1.0))
    target = await sent(address, *[GREEDY] * 8, drawn, num_kept=3)
    assert target.kept == [Kept(GREEDY, (1, 2), 4)] * 3


async def test_an_answer_is_compared_with_the_same_past_the_cache(servicer: RecordingServicer, address: str) -> None:
    servicer.script("Generate", finished_stream("a", "b"))
    async with AsyncClient(address) as client:
        found = await compare_alone(client, [Kept(HURRIED, (1, 2), 4), Kept(GREEDY, (1, 3), 0)])
    assert (found.num_compared, found.num_hits, found.num_different) == (2, 1, 1)
    assert all(request.bypass_prefix_cache for request in servicer.requests("Generate"))


@pytest.fixture
async def idle(address: str) -> WorkerStats:
    """The statistics of a worker that does nothing."""
    async with AsyncClient(address) as client:
        return await client.stats()


def readings(stats: WorkerStats, *, mb_per_min: float) -> list[Reading]:
    """Five minutes in which memory grows; in the first it grows a lot more."""
    grown = [100e6 * min(at_s, 60) + mb_per_min * 1e6 / 60 * at_s for at_s in range(300)]
    return [Reading(float(at_s), round(size), 10, 10, stats) for at_s, size in enumerate(grown)]


def test_growth_is_that_after_the_first_minute(idle: WorkerStats) -> None:
    assert growth_mb_per_min(readings(idle, mb_per_min=2.5), settle_s=60) == pytest.approx(2.5, abs=0.001)


def broken(findings: Findings) -> set[str]:
    """The names of what does not hold over ten minutes."""
    return {verdict.name for verdict in judge(findings, bounds_for(10)) if not verdict.holds}


def test_each_thing_that_does_not_hold_is_named(idle: WorkerStats) -> None:
    at_rest = Reading(300.0, 0, 10, 10, idle)
    good = Findings(Counter(), "", readings(idle, mb_per_min=0.1), at_rest, at_rest, Comparison(20, 9, 0), 0)
    assert broken(good) == set()
    busy = replace(idle, engine=replace(idle.engine, num_busy_slots=1))
    failed = replace(idle, failed_calls={"INTERNAL": 1, "CANCELLED": 5})
    lag = replace(idle.latency, loop_lag=replace(idle.latency.loop_lag, p99_s=0.02))
    late = [replace(reading, stats=replace(reading.stats, latency=lag)) for reading in good.readings]
    assert broken(replace(good, readings=readings(idle, mb_per_min=1.5))) == {"memory growth"}
    assert broken(replace(good, readings=[])) == {"memory growth", "loop lag p99"}
    assert broken(replace(good, errors={"INTERNAL": 1})) == {"errors that clients saw"}
    assert broken(replace(good, after=replace(at_rest, stats=failed))) == {"failures that the worker counted"}
    assert broken(replace(good, readings=late)) == {"loop lag p99"}
    assert broken(replace(good, comparison=Comparison(20, 9, 1))) == {"answers that are others alone"}
    assert broken(replace(good, comparison=Comparison(19, 9, 0))) == {"answers that are others alone"}
    assert broken(replace(good, after=replace(at_rest, stats=busy))) == {"left over"}
    assert broken(replace(good, after=replace(at_rest, num_threads=40))) == {"threads of the worker"}
    assert broken(replace(good, after=replace(at_rest, num_files=40))) == {"its open files"}
    assert broken(replace(good, num_tracebacks=1)) == {"tracebacks in its log"}

"""Engines above real tiers: requests that are asked during a fault, what a fault may cost, what must be left of it."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil

from prefixcache.core.blocks import num_reusable_blocks, token_bytes
from prefixcache.errors import TierUnavailable
from prefixcache.storage.breaker import BreakerOptions
from prefixcache.storage.chain import BlockChain
from prefixcache.storage.disk import DiskTier
from prefixcache.storage.disk.lane import Priority
from prefixcache.storage.lower_tier import LowerTier
from prefixcache.storage.remote import RemoteTier
from prefixcache.storage.remote_options import RemoteOptions, parse_target
from tests.engine.driver import BLOCK_SIZE, PATIENCE_S, Answer, Driver, random_prompt, until

LONG_DEADLINE_S = 10.0
DEADLINE_S = 0.25
# A request fails at one lookup and one read of its own, and waits for others' fetches until the breaker opens.
MAX_FAILING_CALLS = BreakerOptions().num_failures + 1
SLACK_S = 3.0
LONGEST_EXTRA_S = MAX_FAILING_CALLS * DEADLINE_S + SLACK_S

NUM_REQUESTS = 4
NUM_SHARED_BLOCKS = 4
NUM_BLOCKS = 8
TIER_THREADS = ("remote-tier", "the disk tier")


def crowd_prompts(*, seed: int = 0) -> list[list[int]]:
    """Prompts of NUM_BLOCKS blocks and a remainder that begin with the same NUM_SHARED_BLOCKS."""
    shared = random_prompt(NUM_SHARED_BLOCKS * BLOCK_SIZE, seed=1_000 + seed)
    num_own = (NUM_BLOCKS - NUM_SHARED_BLOCKS) * BLOCK_SIZE + 3
    return [shared + random_prompt(num_own, seed=2_000 + 10 * seed + number) for number in range(NUM_REQUESTS)]


@dataclass(frozen=True)
class Crowd:
    """Requests that run at once: what a worker without tiers answers them, and within which time."""

    prompts: list[list[int]]
    token_ids: list[list[int]]
    plain_s: float

    @classmethod
    async def asked(cls, plain: Driver, prompts: list[list[int]]) -> "Crowd":
        """What ``plain``, which has no tiers, answers."""
        started_at = time.monotonic()
        answers = await asyncio.gather(*(plain.answer(prompt) for prompt in prompts))
        return cls(prompts, [answer.token_ids for answer in answers], time.monotonic() - started_at)

    async def ask(self, driver: Driver, *, extra_s: float = LONGEST_EXTRA_S) -> list[Answer]:
        """Ask all at once; the answers must be those without tiers, at most ``extra_s`` later."""
        started_at = time.monotonic()
        answers = await asyncio.gather(*(driver.answer(prompt) for prompt in self.prompts))
        took_s = time.monotonic() - started_at
        assert [answer.token_ids for answer in answers] == self.token_ids
        assert took_s < self.plain_s + extra_s, f"it took {took_s:.2f} s, without tiers {self.plain_s:.2f} s"
        return answers

    async def fill(self, driver: Driver) -> None:
        """Have all blocks of the prompts in the tiers, and the driver at rest."""
        await self.ask(driver)
        await written(driver)

    async def ask_until_fetched(self, driver: Driver, tier_name: str) -> None:
        """Wait until blocks go down and all of a prompt's come up again."""
        ends_at = time.monotonic() + PATIENCE_S
        while not (await is_reachable(driver) and await self._is_fetched(driver, tier_name)):
            assert time.monotonic() < ends_at, f"{tier_name} is not used again"
            await asyncio.sleep(0.02)

    async def _is_fetched(self, driver: Driver, tier_name: str) -> bool:
        await empty_memory(driver)
        await self.fill(driver)
        await empty_memory(driver)
        answer = await driver.answer(self.prompts[0])
        return answer.record.fetched_tokens_by_tier == {tier_name: num_reusable_tokens(self.prompts[0])}


def num_reusable_tokens(prompt: list[int]) -> int:
    return num_reusable_blocks(len(prompt), BLOCK_SIZE) * BLOCK_SIZE


def fetched_tokens(answers: Iterable[Answer]) -> int:
    """Tokens that came from below L1."""
    return sum(sum(answer.record.fetched_tokens_by_tier.values()) for answer in answers)


async def empty_memory(driver: Driver) -> None:
    """Leave no block in L1; the tiers keep theirs."""
    await at_rest(driver)
    driver.worker.cache.evict_to(0)


async def is_reachable(driver: Driver) -> bool:
    """Whether all tiers answer; a call to one that did not lately lets it be probed."""
    chain = chain_of(driver, random_prompt(BLOCK_SIZE))
    for lower in lower_tiers(driver):
        try:
            await lower._tier.lookup(chain.root, chain.hashes)
        except TierUnavailable:
            return False
    return True


async def written(driver: Driver) -> None:
    """Wait until nothing runs and all blocks are in the tiers.

    Workers of one process share their model, which can be used by one of them at a time.
    """
    await at_rest(driver)
    await driver.engine._store.drain()


async def at_rest(driver: Driver) -> None:
    """Wait until nothing waits, runs or holds a block."""
    await driver.settle()
    await until(lambda: not driver.engine.stats().cache.num_held_blocks)


def lower_tiers(driver: Driver) -> list[LowerTier]:
    return driver.engine._store._tiers


def remote_of(driver: Driver) -> RemoteTier:
    tier = lower_tiers(driver)[-1]._tier
    assert isinstance(tier, RemoteTier)
    return tier


def disk_of(driver: Driver) -> DiskTier:
    tier = lower_tiers(driver)[0]._tier
    assert isinstance(tier, DiskTier)
    return tier


async def cut_file(disk: DiskTier, length: int) -> None:
    """Shorten the disk's file between two transactions; in the middle of one it would end the process."""
    ends_at = asyncio.get_running_loop().time() + PATIENCE_S
    cut = partial(os.truncate, disk._file._folder.blocks, length)
    await disk._lane.run(cut, priority=Priority.PATIENT, ends_at=ends_at)


def chain_of(driver: Driver, prompt: list[int], *, cache_salt: str = "") -> BlockChain:
    """The prompt's blocks as tiers see them."""
    loop = driver.engine._loop
    return BlockChain(loop.state.promoter._format, loop.admission.scope_root(cache_salt), token_bytes(prompt))


def before_next(tier: object, call: str, act: Callable[[], object]) -> asyncio.Event:
    """Let ``act`` happen right before the next ``call`` of ``tier`` begins; the event is set then."""
    original, happened = getattr(tier, call), asyncio.Event()

    async def act_first(*args: Any, **options: Any) -> Any:
        delattr(tier, call)
        act()
        happened.set()
        return await original(*args, **options)

    setattr(tier, call, act_first)
    return happened


async def check_tiers_rest(driver: Driver) -> None:
    """Wait for rest; assert that nothing is held and no fetch, write, call or connection is under way."""
    await written(driver)
    await driver.check_at_rest()
    assert driver.engine._loop.state.promoter._fetching == {}
    for lower in lower_tiers(driver):
        assert lower._queue.stats.pending_bytes == 0
        if isinstance(lower._tier, RemoteTier):
            await until(lambda remote=lower._tier: _is_idle(remote))  # type: ignore[misc]


def _is_idle(remote: RemoteTier) -> bool:
    busy = [node for node in remote._nodes.known() if node.pool._in_use_connections]
    return not (busy or remote._num_calls or remote._in_flight_bytes or remote._layout._runner._running)


class Leftovers:
    """Finds the tasks, threads and connections that were not there when it was made."""

    def __init__(self) -> None:
        self._tasks = asyncio.all_tasks()
        self._threads = set(threading.enumerate())

    async def check_none(self, remotes: Iterable[RemoteOptions]) -> None:
        """Assert that the tiers have left nothing; connections to ``remotes`` count."""
        ports = {port for options in remotes for _, port in parse_target(options).hosts}
        tasks = asyncio.all_tasks() - self._tasks - {asyncio.current_task()}
        assert not tasks, f"tasks are left: {tasks}"
        await until(lambda: not self._new_threads())
        await until(lambda: not _connections_to(ports))

    def _new_threads(self) -> list[str]:
        names = [thread.name for thread in threading.enumerate() if thread not in self._threads]
        return [name for name in names if name.startswith(TIER_THREADS)]


def _connections_to(ports: set[int]) -> list[Any]:
    found = psutil.Process().net_connections("tcp")
    return [one for one in found if one.status == psutil.CONN_ESTABLISHED and one.raddr and one.raddr.port in ports]


def impatient(url: str, **options: Any) -> RemoteOptions:
    """A remote store of which a call may take DEADLINE_S, for faults that cost it."""
    return replace(RemoteOptions(url, deadline_s=DEADLINE_S), **options)


def patient(url: str) -> RemoteOptions:
    """A remote store whose answers are waited for, however busy the machine is."""
    return RemoteOptions(url, deadline_s=LONG_DEADLINE_S)

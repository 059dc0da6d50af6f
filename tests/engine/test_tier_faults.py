"""Requests while a tier's server or its network fails: the same tokens, a bounded time later, and nothing is left."""

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from prefixcache.storage.breaker import BreakerState
from tests.engine.conftest import StartOn
from tests.engine.driver import Driver, until
from tests.engine.tiers import (
    DEADLINE_S,
    MAX_FAILING_CALLS,
    NUM_BLOCKS,
    SLACK_S,
    Crowd,
    before_next,
    chain_of,
    empty_memory,
    fetched_tokens,
    impatient,
    patient,
    remote_of,
)
from tests.fakes.certificates import Authority
from tests.fakes.proxy import Proxy
from tests.fakes.valkey import Valkey, running_cluster, running_valkey

SECRET = "the word of the server"
NUM_CALLS_PER_REQUEST = 2
FELT_DEADLINE_S = 1.0
MEBIBYTE = 2**20

pytestmark = pytest.mark.usefixtures("always_asks", "soon_asks_again")


def breaker_state(driver: Driver) -> BreakerState:
    (node,) = remote_of(driver)._nodes.known()
    return node.breaker.state


async def test_a_server_killed_before_the_first_request(start_on: StartOn, server: Valkey, crowd: Crowd) -> None:
    server.kill()
    driver = await start_on(redis=impatient(server.url))
    await crowd.ask(driver)
    server.start()
    await crowd.ask_until_fetched(driver, "redis")


@pytest.mark.parametrize("call", ["lookup", "read", "write"])
async def test_a_server_killed_during_a_call(start_on: StartOn, server: Valkey, crowd: Crowd, call: str) -> None:
    driver = await start_on(redis=impatient(server.url))
    if call != "write":
        await crowd.fill(driver)
        await empty_memory(driver)
    is_stopped = before_next(remote_of(driver), call, server.pause)
    asking = asyncio.create_task(crowd.ask(driver))
    await is_stopped.wait()
    await until(lambda: bool(remote_of(driver)._layout._runner._running))
    server.kill()
    await asking
    server.start()
    await crowd.ask_until_fetched(driver, "redis")


async def test_a_stopped_server_costs_its_deadlines_once(start_on: StartOn, server: Valkey, crowd: Crowd) -> None:
    driver = await start_on(redis=impatient(server.url, deadline_s=FELT_DEADLINE_S))
    await crowd.fill(driver)
    await empty_memory(driver)
    server.pause()
    await crowd.ask(driver, extra_s=MAX_FAILING_CALLS * FELT_DEADLINE_S + SLACK_S)
    assert breaker_state(driver) is not BreakerState.CLOSED
    await empty_memory(driver)
    answers = await crowd.ask(driver)
    assert max(answer.record.fetch_s for answer in answers) < FELT_DEADLINE_S
    server.resume()
    await crowd.ask_until_fetched(driver, "redis")


async def test_a_server_that_stops_in_the_middle_of_a_fetch(start_on: StartOn, server: Valkey, crowd: Crowd) -> None:
    driver = await start_on(redis=impatient(server.url))
    await crowd.fill(driver)
    await empty_memory(driver)
    is_stopped = before_next(remote_of(driver), "read", server.pause)
    await crowd.ask(driver)
    assert is_stopped.is_set()
    server.resume()
    await crowd.ask_until_fetched(driver, "redis")


@pytest.mark.slow
async def test_a_server_stopped_for_half_a_minute(start_on: StartOn, server: Valkey, crowd: Crowd) -> None:
    driver = await start_on(redis=impatient(server.url))
    await crowd.fill(driver)
    server.pause()
    ends_at = time.monotonic() + 30.0
    while time.monotonic() < ends_at:
        await empty_memory(driver)
        await crowd.ask(driver)
    server.resume()
    await crowd.ask_until_fetched(driver, "redis")


async def test_a_stopped_server_does_not_keep_the_engine_from_stopping(
    start_on: StartOn, server: Valkey, crowd: Crowd
) -> None:
    driver = await start_on(redis=impatient(server.url))
    server.pause()
    await crowd.ask(driver)
    started_at = time.monotonic()
    await driver.engine.stop(grace_s=0.0)
    assert time.monotonic() - started_at < 4 * DEADLINE_S + SLACK_S
    driver.check_nothing_is_held()
    server.resume()


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru", "volatile-lru", "allkeys-lfu"])
async def test_a_full_server(start_on: StartOn, server: Valkey, crowd: Crowd, policy: str) -> None:
    fill_up(server, policy)
    writer, reader = [await start_on(redis=patient(server.url)) for _ in range(2)]
    await crowd.fill(writer)
    await crowd.ask(reader)
    stats = await remote_of(writer).stats()
    assert (stats.dropped > 0) == (policy == "noeviction")
    assert stats.failed_calls == 0
    with server.client() as client:
        client.flushall()
    await crowd.ask_until_fetched(reader, "redis")


def fill_up(server: Valkey, policy: str) -> None:
    """Leave the server no memory but what it frees itself."""
    with server.client() as client:
        client.config_set("maxmemory-policy", policy)
        limit = client.info("memory")["used_memory"] + 2 * MEBIBYTE
        for number in range(2 * MEBIBYTE // 4_096):
            client.set(f"of another {number}", bytes(4_096), ex=600)
        client.config_set("maxmemory", limit)


async def test_a_connection_reset_in_the_middle_of_a_value(start_on: StartOn, server: Valkey, crowd: Crowd) -> None:
    with Proxy(server.port) as proxy:
        driver = await start_on(redis=impatient(f"redis://127.0.0.1:{proxy.port}"))
        await crowd.fill(driver)
        await empty_memory(driver)
        value_bytes = driver.engine.description.block_bytes

        def cut_in_third() -> None:
            proxy.cut_after = value_bytes * 5 // 2

        before_next(remote_of(driver), "read", cut_in_third)
        answers = await crowd.ask(driver)
        assert fetched_tokens(answers) < sum(len(prompt) for prompt in crowd.prompts) // 2
        proxy.cut_after = None
        await crowd.ask_until_fetched(driver, "redis")
        await driver.engine.stop(grace_s=0.0)


@pytest.mark.parametrize("deadline_s", [DEADLINE_S, 2.0], ids=["above the deadline", "within the deadline"])
async def test_half_a_second_of_latency(start_on: StartOn, server: Valkey, crowd: Crowd, deadline_s: float) -> None:
    with Proxy(server.port) as proxy:
        driver = await start_on(redis=impatient(f"redis://127.0.0.1:{proxy.port}", deadline_s=deadline_s))
        await crowd.fill(driver)
        await empty_memory(driver)
        proxy.delay_s = 0.25
        await crowd.ask(driver, extra_s=NUM_CALLS_PER_REQUEST * 2 * deadline_s + SLACK_S)
        proxy.delay_s = 0.0
        await crowd.ask_until_fetched(driver, "redis")
        await driver.engine.stop(grace_s=0.0)


async def test_a_wrong_password(start_on: StartOn, tmp_path: Path, crowd: Crowd) -> None:
    with running_valkey(tmp_path / "locked", settings=[f'requirepass "{SECRET}"']) as locked:
        driver = await start_on(redis=impatient(locked.url, password="another word"))
        await crowd.ask(driver)
        with locked.client(password=SECRET) as client:
            client.config_set("requirepass", "another word")
        await crowd.ask_until_fetched(driver, "redis")
        await driver.engine.stop(grace_s=0.0)


async def test_an_expired_certificate(start_on: StartOn, server: Valkey, crowd: Crowd, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    expired, good = authority.issue("old", is_expired=True), authority.issue("new")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(expired.certificate, expired.key)
    with Proxy(server.port, tls=context) as proxy:
        driver = await start_on(redis=replace(patient(f"rediss://127.0.0.1:{proxy.port}"), ca_file=authority.ca_file))
        await crowd.ask(driver)
        with server.client() as client:
            assert client.dbsize() == 0
        context.load_cert_chain(good.certificate, good.key)
        await crowd.ask_until_fetched(driver, "redis")
        await driver.engine.stop(grace_s=0.0)


async def test_a_killed_node_of_a_cluster(start_on: StartOn, tmp_path: Path, crowd: Crowd) -> None:
    with running_cluster(tmp_path / "cluster") as servers:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        driver = await start_on(redis=impatient(f"redis+cluster://{hosts}"))
        await crowd.fill(driver)
        servers[1].kill()
        for _ in range(3):
            await empty_memory(driver)
            await crowd.ask(driver)
        servers[1].start()
        await crowd.ask_until_fetched(driver, "redis")
        await driver.engine.stop(grace_s=0.0)


@pytest.mark.parametrize("call", ["lookup", "read", "write"])
async def test_a_flush_in_the_middle(start_on: StartOn, server: Valkey, crowd: Crowd, call: str) -> None:
    driver = await start_on(redis=patient(server.url))
    if call != "write":
        await crowd.fill(driver)
        await empty_memory(driver)
    is_flushed = before_next(remote_of(driver), call, lambda: flush(server))
    await crowd.fill(driver)
    assert is_flushed.is_set()
    assert await remote_of(driver).lookup(*whole_chain(driver, crowd)) == NUM_BLOCKS, "what was lost is written again"


def flush(server: Valkey) -> None:
    with server.client() as client:
        client.flushall()


def whole_chain(driver: Driver, crowd: Crowd) -> tuple[bytes, list[bytes]]:
    chain = chain_of(driver, crowd.prompts[0])
    return chain.root, chain.hashes


class JumpingClock:
    """The time of day of somebody who sets it."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.offset_s


@pytest.mark.parametrize("jump_s", [1e6, -1e6], ids=["forward", "back"])
async def test_a_clock_that_jumps(
    start_on: StartOn, server: Valkey, crowd: Crowd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    clock = JumpingClock()
    driver = await start_on(redis=patient(server.url), disk=tmp_path / "disk", clock=clock)
    await crowd.fill(driver)
    wall_clock: Callable[[], float] = time.time
    monkeypatch.setattr(time, "time", lambda: wall_clock() + jump_s)
    for offset_s in (jump_s, 0.0):
        clock.offset_s = offset_s
        await empty_memory(driver)
        answers = await crowd.ask(driver)
        assert fetched_tokens(answers) > 0

"""Workers with tiers from outside: their flags, and what a folder and a server give to the next worker."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from model_worker import LocalClient
from model_worker.config import TierSettings, WorkerSettings
from model_worker.flags import parse, settings_from
from model_worker.tiers import open_store
from prefixcache import Client, ConfigError, EngineStopped
from prefixcache.storage.remote_options import RemoteOptions
from prefixcache.storage.tiered import WritePolicy
from tests.fakes.valkey import Valkey, running_valkey

PROMPT = [1, 2, 3, 4, 5, 6] * 4
OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True}

StartLocal = Callable[..., Client]


@pytest.fixture
def start_local(tiny_folder: Path) -> Iterator[StartLocal]:
    """Workers in this process; ended after the test, the last one first."""
    with ExitStack() as stack:

        def start(**tiers: Any) -> Client:
            settings = TierSettings(**tiers)
            client = LocalClient(model=str(tiny_folder), l1_bytes=10**6, block_size=8, num_threads=1, tiers=settings)
            return stack.enter_context(client)

        yield start


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path / "valkey") as server:
        yield server


def test_a_worker_finds_what_an_earlier_one_left_in_its_folder(start_local: StartLocal, tmp_path: Path) -> None:
    with start_local(disk=tmp_path / "blocks", disk_bytes=10**7) as first:
        expected = first.generate(PROMPT, **OPTIONS)
    second = start_local(disk=tmp_path / "blocks", disk_bytes=10**7)
    assert second.lookup(PROMPT).available_tokens_by_tier == {"disk": 16}
    answer = second.generate(PROMPT, **OPTIONS)
    assert answer.token_ids == expected.token_ids
    assert answer.usage.cached_prompt_tokens_by_tier == {"disk": 16}
    assert answer.timings.fetch_s > 0
    assert second.generate(PROMPT, **OPTIONS).usage.cached_prompt_tokens_by_tier == {"l1": 16}
    assert second.lookup(PROMPT).available_tokens_by_tier == {"l1": 16}


def test_workers_share_by_a_server_and_see_each_other_there(start_local: StartLocal, valkey: Valkey) -> None:
    one, other = (start_local(redis=RemoteOptions(valkey.url)) for _ in range(2))
    expected = one.generate(PROMPT, **OPTIONS)
    wait_until_written(one, num_blocks=3)
    with other.stream(PROMPT, **OPTIONS) as stream:
        list(stream)
    assert stream.result.token_ids == expected.token_ids
    assert stream.result.usage.cached_prompt_tokens_by_tier == {"redis": 16}
    stats = other.stats()
    (tier,) = stats.tiers
    assert (tier.name, tier.hit_blocks, list(tier.breakers.values())) == ("redis", 2, ["closed"])
    assert [entry.is_own for entry in tier.namespaces] == [True]
    assert stats.fetches == {"fetched": 1}


def test_clear_reaches_the_server(start_local: StartLocal, valkey: Valkey) -> None:
    one, other = (start_local(redis=RemoteOptions(valkey.url)) for _ in range(2))
    one.generate(PROMPT, cache_salt="a", **OPTIONS)
    wait_until_written(one, num_blocks=3)
    assert one.clear().cleared_blocks == 3
    assert other.generate(PROMPT, cache_salt="a", **OPTIONS).usage.cached_prompt_tokens == 0


def test_a_clear_that_a_dead_server_missed_is_said_to_be_incomplete(start_local: StartLocal, valkey: Valkey) -> None:
    client = start_local(redis=RemoteOptions(valkey.url, deadline_s=0.2))
    client.generate(PROMPT, **OPTIONS)
    valkey.kill()
    with pytest.raises(EngineStopped, match="memory is cleared, but not every tier"):
        client.clear()
    assert client.lookup(PROMPT).cached_prompt_tokens == 0


def test_a_worker_starts_and_serves_without_its_server(start_local: StartLocal, valkey: Valkey) -> None:
    valkey.kill()
    client = start_local(redis=RemoteOptions(valkey.url, deadline_s=0.2))
    assert len(client.generate(PROMPT, **OPTIONS).token_ids) == 4
    assert client.stats().tiers[0].misses["unavailable"] > 0


def test_a_folder_belongs_to_one_worker(start_local: StartLocal, tmp_path: Path) -> None:
    start_local(disk=tmp_path, disk_bytes=10**7)
    with pytest.raises(ConfigError, match="used by another worker"):
        start_local(disk=tmp_path, disk_bytes=10**7)


def test_every_tier_flag_reaches_its_setting(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("word\n")
    flags = (
        f"--disk {tmp_path} --disk-bytes 20GB --disk-deadline 0.5 --redis redis://h:1 --redis-username u "
        f"--redis-password-file {secret} --redis-ca ca --redis-cert cert --redis-key key --redis-prefix p "
        "--redis-deadline 0.25 --redis-connections 7 --write-policy selective --write-queue-bytes 5MB --tier-ttl 60"
    )
    tiers = settings_from(parse(flags.split(), {})).tiers
    assert (tiers.disk, tiers.disk_bytes, tiers.disk_deadline_s) == (tmp_path, 20 * 10**9, 0.5)
    assert (tiers.write_policy, tiers.write_queue_bytes, tiers.ttl_s) == (WritePolicy.SELECTIVE, 5 * 10**6, 60.0)
    assert tiers.redis == RemoteOptions(
        "redis://h:1",
        username="u",
        password="word",
        ca_file=Path("ca"),
        certificate_file=Path("cert"),
        key_file=Path("key"),
        key_prefix="p",
        deadline_s=0.25,
        num_connections=7,
    )


def test_a_url_with_a_password_can_come_from_a_variable() -> None:
    tiers = settings_from(parse([], {"PREFIXCACHE_REDIS": "redis://:word@h:1"})).tiers
    assert tiers.redis is not None
    assert "word" not in repr(tiers)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--redis", "http://h"], "does not begin with one of redis://"),
        (["--redis", "redis://h", "--redis-password-file", "no-such-file"], "no-such-file cannot be read"),
        (["--redis", "redis://h", "--redis-ca", "ca.pem"], "without TLS"),
        (["--redis", "redis://h", "--redis-prefix", "a b"], "key_prefix is 'a b'"),
        (["--redis", "redis://h", "--redis-deadline", "0"], "deadline_s is 0"),
        (["--disk", "x", "--disk-bytes", "0"], "disk_bytes is 0"),
        (["--disk", "x", "--disk-deadline", "0"], "disk_deadline_s is 0"),
        (["--disk", "x", "--no-cache"], "caching is off"),
        (["--disk", "pyproject.toml"], "pyproject.toml"),
        (["--tier-ttl", "0"], "ttl_s is 0"),
        (["--write-queue-bytes", "0"], "write_queue_bytes is 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
async def test_a_tier_that_cannot_be_is_refused_and_says_why(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await open_store(settings_from(parse(flags, {})).tiers)


def test_a_worker_with_such_a_tier_ends_with_2_before_anything_is_loaded(tiny_folder: Path) -> None:
    command = [sys.executable, "-m", "model_worker", "--model", str(tiny_folder), "--redis", "http://user:word@h"]
    ended = subprocess.run([*command, "--listen", "127.0.0.1:0"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "does not begin with one of redis://" in ended.stderr
    assert "word" not in ended.stderr
    assert "Traceback" not in ended.stderr


WITHOUT = """
import asyncio, sys
sys.modules[sys.argv[1]] = None
from model_worker.flags import parse, settings_from
from model_worker.tiers import open_store
from model_worker.tiers import open_store
asyncio.run(open_store(settings_from(parse(sys.argv[2:], {})).tiers))
"""


@pytest.mark.parametrize(
    ("extra", "module", "flags"),
    [("disk", "lmdb", ["--disk", "blocks"]), ("redis", "redis", ["--redis", "redis://h"])],
    ids=["disk", "redis"],
)
def test_a_missing_package_is_named_with_the_way_to_install_it(extra: str, module: str, flags: list[str]) -> None:
    command = [sys.executable, "-c", WITHOUT, module, *flags]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
    assert f"'{module}', which is not installed; run: pip install 'prefixcache[{extra}]'" in said


def test_the_write_queues_are_in_the_memory_plan(start_local: StartLocal, tmp_path: Path) -> None:
    client = start_local(disk=tmp_path, disk_bytes=10**7, write_queue_bytes=12_345)
    assert client.model_info().memory_plan_bytes["write_queues"] == 12_345


def test_a_tier_and_no_cache_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="caching is off"):
        WorkerSettings(is_cache_enabled=False, tiers=TierSettings(disk=tmp_path))


def wait_until_written(client: Client, *, num_blocks: int) -> None:
    for _ in range(2_000):
        if client.stats().tiers[0].written_blocks >= num_blocks:
            return
    raise AssertionError(f"{client.stats().tiers[0]} has not written {num_blocks} blocks")

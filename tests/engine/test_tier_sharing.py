"""Workers that share a server, and workers that come back: whose blocks are taken, with the bits of a cold run."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_worker.models import loading
from tests.engine.conftest import Start, StartOn
from tests.engine.driver import BLOCK_SIZE, Answer, Driver, random_prompt
from tests.engine.tiers import empty_memory, lower_tiers, num_reusable_tokens, patient, written
from tests.fakes.valkey import Valkey

NUM_BLOCKS = 20
PROMPT = random_prompt(NUM_BLOCKS * BLOCK_SIZE + 3)
DTYPES = ["float32", "bfloat16"]

Cold = tuple[Answer, list[Tensor]]

pytestmark = pytest.mark.usefixtures("always_asks")


async def fill(driver: Driver, prompt: list[int] = PROMPT, **options: Any) -> Answer:
    """Have the blocks of the prompt in the driver's tiers."""
    answer = await driver.answer(prompt, **options)
    await written(driver)
    return answer


async def cold_run(start: Start, **changes: Any) -> Cold:
    """Answer and logits of a worker without tiers."""
    driver = await start(**changes)
    cold = await driver.answer_with_logits(PROMPT)
    await driver.engine.stop(grace_s=0.0)
    return cold


async def check_fetches_cold_bits(
    driver: Driver, cold: Cold, by_tier: dict[str, int], *, prompt: list[int] = PROMPT
) -> None:
    """``by_tier`` blocks come from each tier, and tokens and logits are those of a worker without tiers."""
    answer, logits = await driver.answer_with_logits(prompt)
    assert answer.record.fetched_tokens_by_tier == {name: blocks * BLOCK_SIZE for name, blocks in by_tier.items()}
    assert answer.record.cached_prompt_tokens == sum(by_tier.values()) * BLOCK_SIZE
    assert answer.token_ids == cold[0].token_ids
    assert len(logits) == len(cold[1])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(logits, cold[1], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
async def test_what_one_worker_computed_another_takes_from_the_server(
    start: Start, start_on: StartOn, server: Valkey, dtype: str
) -> None:
    cold = await cold_run(start, dtype=dtype)
    await fill(await start_on(redis=patient(server.url), dtype=dtype))
    other = await start_on(redis=patient(server.url), dtype=dtype)
    await check_fetches_cold_bits(other, cold, {"redis": NUM_BLOCKS})


@pytest.mark.parametrize("num_blocks", [1, 7, 8, 9, NUM_BLOCKS - 1])
async def test_a_prefix_that_another_prompt_left_has_the_bits_of_a_cold_run(
    start: Start, start_on: StartOn, server: Valkey, num_blocks: int
) -> None:
    cold = await cold_run(start)
    await fill(await start_on(redis=patient(server.url)), [*PROMPT[: num_blocks * BLOCK_SIZE], 7, 7, 7])
    other = await start_on(redis=patient(server.url))
    await check_fetches_cold_bits(other, cold, {"redis": num_blocks})


async def test_memory_disk_and_server_each_give_a_part(
    start: Start, start_on: StartOn, server: Valkey, tmp_path: Path
) -> None:
    cold = await cold_run(start)
    await fill(await start_on(redis=patient(server.url)))
    driver = await start_on(redis=patient(server.url), disk=tmp_path / "disk")
    await fill(driver, PROMPT[: 12 * BLOCK_SIZE + 1])
    await empty_memory(driver)
    await fill(driver, PROMPT[: 5 * BLOCK_SIZE + 1])
    answer, logits = await driver.answer_with_logits(PROMPT)
    assert answer.record.fetched_tokens_by_tier == {"disk": 7 * BLOCK_SIZE, "redis": 8 * BLOCK_SIZE}
    assert answer.record.cached_prompt_tokens == NUM_BLOCKS * BLOCK_SIZE
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(logits, cold[1], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
async def test_a_worker_that_comes_back_finds_its_disk(
    start: Start, start_on: StartOn, tmp_path: Path, dtype: str
) -> None:
    cold = await cold_run(start, dtype=dtype)
    before = await start_on(disk=tmp_path, dtype=dtype)
    await fill(before)
    await before.engine.stop(grace_s=0.0)
    await check_fetches_cold_bits(await start_on(disk=tmp_path, dtype=dtype), cold, {"disk": NUM_BLOCKS})


async def test_a_worker_that_comes_back_finds_the_server(start: Start, start_on: StartOn, server: Valkey) -> None:
    cold = await cold_run(start)
    before = await start_on(redis=patient(server.url))
    await fill(before)
    await before.engine.stop(grace_s=0.0)
    await check_fetches_cold_bits(await start_on(redis=patient(server.url)), cold, {"redis": NUM_BLOCKS})


async def test_what_came_from_the_server_is_on_the_disk_when_the_server_is_gone(
    start: Start, start_on: StartOn, server: Valkey, tmp_path: Path
) -> None:
    cold = await cold_run(start)
    await fill(await start_on(redis=patient(server.url)))
    before = await start_on(redis=patient(server.url), disk=tmp_path / "disk")
    await fill(before)
    await before.engine.stop(grace_s=0.0)
    server.kill()
    after = await start_on(redis=patient(server.url), disk=tmp_path / "disk")
    await check_fetches_cold_bits(after, cold, {"disk": NUM_BLOCKS})


async def test_what_is_written_last_is_there_after_the_worker_has_stopped(
    start_on: StartOn, server: Valkey, tmp_path: Path
) -> None:
    before = await start_on(redis=patient(server.url), disk=tmp_path / "disk")
    await before.answer(PROMPT)
    await before.engine.stop(grace_s=0.0)
    for tiers in ({"redis": patient(server.url)}, {"disk": tmp_path / "disk"}):
        after = await start_on(**tiers)
        assert (await after.answer(PROMPT)).record.cached_prompt_tokens == num_reusable_tokens(PROMPT)


Change = Callable[[Path, pytest.MonkeyPatch], dict[str, Any]]


def another_dtype(_folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"dtype": "bfloat16"}


def another_block_size(_folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"block_size": 2 * BLOCK_SIZE}


def another_numerics_profile(_folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"num_threads": 2}


def another_canary(_folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr("model_worker.worker.canary_digest", lambda _model: "other bits")
    return {}


def other_weights(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, Any]:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    return {"model": str(folder)}


def another_rope(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, Any]:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"]["rope_theta"] = 20_000.0
    file.write_text(json.dumps(config))
    return {"model": str(folder)}


@pytest.mark.parametrize(
    "change",
    [another_dtype, another_block_size, another_numerics_profile, another_canary, other_weights, another_rope],
    ids=lambda change: change.__name__,
)
async def test_a_worker_that_computes_otherwise_hits_nothing_at_any_tier(
    start_on: StartOn,
    server: Valkey,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Change,
) -> None:
    disk = tmp_path / "disk"
    before = await start_on(redis=patient(server.url), disk=disk)
    await fill(before)
    await before.engine.stop(grace_s=0.0)
    changes = change(shutil.copytree(tiny_folder, tmp_path / tiny_folder.name), monkeypatch)
    other = await start_on(redis=patient(server.url), disk=disk, **changes)
    answer = await other.answer(PROMPT)
    assert (answer.record.cached_prompt_tokens, answer.record.fetch_outcome) == (0, "absent")
    assert [(await lower.stats()).hit_blocks for lower in lower_tiers(other)] == [0, 0]


async def test_another_salt_hits_nothing_at_any_tier(start_on: StartOn, server: Valkey, tmp_path: Path) -> None:
    driver = await start_on(redis=patient(server.url), disk=tmp_path / "disk")
    await fill(driver, cache_salt="mine")
    await empty_memory(driver)
    for salt in ("", "theirs"):
        answer = await driver.answer(PROMPT, cache_salt=salt)
        assert (answer.record.cached_prompt_tokens, answer.record.fetch_outcome) == (0, "absent")
    await empty_memory(driver)
    again = await driver.answer(PROMPT, cache_salt="mine")
    assert again.record.cached_prompt_tokens == num_reusable_tokens(PROMPT)


async def test_two_workers_at_once_fill_and_use_one_server(
    start: Start, start_on: StartOn, server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_prompt(10 * BLOCK_SIZE + number, seed=number) for number in range(1, 5)]
    plain = await start()
    expected = [(await plain.answer(prompt)).token_ids for prompt in prompts]
    await plain.engine.stop(grace_s=0.0)
    monkeypatch.setattr("model_worker.worker.load", loading.load)
    workers = [await start_on(redis=patient(server.url)) for _ in range(2)]
    for _ in range(3):
        asked = [(driver, number) for number in range(len(prompts)) for driver in workers]
        answers = await asyncio.gather(*(driver.answer(prompts[number]) for driver, number in asked))
        assert [answer.token_ids for answer in answers] == [expected[number] for _, number in asked]
        for driver in workers:
            await empty_memory(driver)
            await driver.engine._store.drain()
    assert {answer.record.cached_prompt_tokens for answer in answers} == {10 * BLOCK_SIZE}

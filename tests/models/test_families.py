"""Every family: a hit has the bits of a cold run, and answers are those of plain transformers."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from model_worker.worker import Worker
from prefixcache.errors import ConfigError
from tests.engine.driver import BLOCK_SIZE, Driver, collect_logits, random_prompt
from tests.models.families import FAMILIES, write_family

NUM_TOKENS = 4 * BLOCK_SIZE + 3
NUM_NEW_TOKENS = 6
NUM_COMPARED_TOKENS = 32

Build: TypeAlias = Callable[..., Worker]
Check: TypeAlias = Callable[[Driver], Awaitable[None]]


@pytest.fixture(scope="module", params=FAMILIES)
def family_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(request.param, tmp_path_factory.mktemp("families") / request.param)


async def served(worker: Worker, observed: list[tuple[int, Tensor]], check: Check) -> None:
    """Run ``check`` on a started engine; it must come to rest with nothing held."""
    driver = Driver(worker, observed)
    await driver.engine.start()
    try:
        await check(driver)
        await driver.check_at_rest()
    finally:
        await driver.engine.stop(grace_s=0.0)


async def check_bits(driver: Driver) -> None:
    await check_boundaries(driver)
    await check_crowd(driver)


async def check_boundaries(driver: Driver) -> None:
    prompt = random_prompt(NUM_TOKENS)
    cold, cold_logits = await driver.answer_with_logits(prompt, max_new_tokens=NUM_NEW_TOKENS)
    for num_blocks in range(1, (NUM_TOKENS - 1) // BLOCK_SIZE + 1):
        await driver.settle()
        driver.engine.clear()
        await driver.warm(prompt[: num_blocks * BLOCK_SIZE] + random_prompt(3, seed=9))
        hit, hit_logits = await driver.answer_with_logits(prompt, max_new_tokens=NUM_NEW_TOKENS)
        assert hit.started.cached_prompt_tokens == num_blocks * BLOCK_SIZE
        assert hit.token_ids == cold.token_ids
        assert len(hit_logits) == NUM_NEW_TOKENS
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(hit_logits, cold_logits, strict=True))


async def check_crowd(driver: Driver) -> None:
    prompts = [random_prompt(length, seed=length) for length in (5, 2 * BLOCK_SIZE, NUM_TOKENS)]
    alone = [await driver.answer_with_logits(prompt, max_new_tokens=NUM_NEW_TOKENS) for prompt in prompts]
    driver.observed.clear()
    crowd = await asyncio.gather(*(driver.answer(prompt, max_new_tokens=NUM_NEW_TOKENS) for prompt in prompts))
    assert [answer.token_ids for answer in crowd] == [answer.token_ids for answer, _ in alone]
    seen = [logits for _, logits in driver.observed]
    assert all(any(torch.equal(logits, other) for other in seen) for _, expected in alone for logits in expected)


def checked_against(folder: Path, *, num_tokens: int = NUM_TOKENS) -> Check:
    """A check that greedy tokens are those of plain transformers."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    async def check(driver: Driver) -> None:
        prompt = random_prompt(num_tokens, seed=1)
        answer = await driver.answer(prompt, max_new_tokens=NUM_COMPARED_TOKENS)
        ids = torch.tensor([prompt])
        output = plain.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_COMPARED_TOKENS
        )
        assert answer.token_ids == output[0, num_tokens:].tolist()
        assert len(set(answer.token_ids)) > 3

    return check


@pytest.fixture
def observed() -> list[tuple[int, Tensor]]:
    """(Slot index, logits) of every token that the worker under test draws."""
    return []


async def test_a_hit_at_every_boundary_and_a_crowd_give_cold_bits(
    build_tiny: Build, family_folder: Path, observed: list[tuple[int, Tensor]]
) -> None:
    worker = build_tiny(model=str(family_folder), observe_logits=collect_logits(observed))
    await served(worker, observed, check_bits)


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "mixtral", "bloom"])
async def test_so_they_do_in_bfloat16(
    build_tiny: Build, tmp_path: Path, family: str, observed: list[tuple[int, Tensor]]
) -> None:
    folder = write_family(family, tmp_path)
    worker = build_tiny(model=str(folder), dtype="bfloat16", observe_logits=collect_logits(observed))
    await served(worker, observed, check_bits)


async def test_greedy_answers_are_those_of_plain_transformers(build_tiny: Build, family_folder: Path) -> None:
    worker = build_tiny(model=str(family_folder), max_model_len=128)
    await served(worker, [], checked_against(family_folder))


async def test_longrope_takes_its_long_factors_for_long_windows_and_else_its_short_ones(
    build_tiny: Build, tmp_path: Path
) -> None:
    folder = write_family("phi3", tmp_path)
    short, long = build_tiny(model=str(folder), max_model_len=128), build_tiny(model=str(folder), max_model_len=129)
    assert short.namespace.rope_digest != long.namespace.rope_digest
    await served(short, [], checked_against(folder, num_tokens=40))
    await served(build_tiny(model=str(folder)), [], checked_against(folder, num_tokens=130))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("bert", "lets tokens see later ones"),
        ("rembert", "fails the check 'causality'"),
        ("diffllama", "fails the check 'chaining'"),
        ("mamba", "fails in the engine|some keep none"),
        ("gpt-oss", "passes s_aux to its attention"),
        ("llama4", "layer 0 of the model is of type 'chunked_attention'"),
        ("recurrent-gemma", "differ in shape or some keep none|fails in the engine"),
    ],
)
def test_a_model_whose_prefixes_cannot_be_reused_is_refused_at_load(
    build_tiny: Build, tmp_path: Path, family: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tiny(model=str(write_family(family, tmp_path)))


@pytest.mark.parametrize("block_size", [86, 100, 200, 254])
async def test_blocks_beyond_a_third_of_learned_positions_are_served(
    build_tiny: Build, tmp_path: Path, block_size: int
) -> None:
    folder = write_family("gpt2", tmp_path)
    await served(build_tiny(model=str(folder), block_size=block_size, l1_bytes=1 << 22), [], check_long_prompt)


async def test_blocks_longer_than_a_window_are_served(build_tiny: Build, tmp_path: Path) -> None:
    folder = write_family("mistral", tmp_path)
    await served(build_tiny(model=str(folder), block_size=100, l1_bytes=1 << 22), [], check_long_prompt)


async def check_long_prompt(driver: Driver) -> None:
    """A prompt that leaves room for one token is answered, and again alike from what is cached of it."""
    info = driver.engine.description
    prompt = random_prompt(info.max_model_len - 1)
    cold = await driver.answer(prompt, max_new_tokens=1)
    hit = await driver.answer(prompt, max_new_tokens=1)
    assert hit.started.cached_prompt_tokens == len(prompt) // info.block_size * info.block_size
    assert hit.token_ids == cold.token_ids


@pytest.mark.parametrize(
    ("family", "last_words"),
    [
        ("bert", "no prefix is reusable; serve a causal model"),
        ("rembert", "no prefix of it can be reused; serve a model that is causal as configured"),
    ],
)
def test_a_refused_model_ends_the_process_with_exit_code_2_and_one_clear_line(
    tmp_path: Path, family: str, last_words: str
) -> None:
    folder = write_family(family, tmp_path)
    command = [
        sys.executable,
        "-m",
        "model_worker",
        "--model",
        str(folder),
        "--device",
        "cpu",
        "--listen",
        "127.0.0.1:0",
    ]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines()[-1].endswith(last_words)
    assert "Traceback" not in ended.stderr

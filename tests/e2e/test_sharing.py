"""The demo model above a disk and a server: what another worker computed, or an earlier one left, has cold bits."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from model_worker.config import TierSettings
from model_worker.tiers import open_store
from prefixcache.storage.remote_options import RemoteOptions
from tests.e2e.conftest import Labs
from tests.e2e.lab import Answer, Lab, assert_same_bits, demo_prompt
from tests.fakes.valkey import running_valkey

PROMPT = 6
NUM_TOKENS = 4
L1_BYTES = 1 << 26

pytestmark = pytest.mark.asyncio(loop_scope="session")

Above: TypeAlias = Callable[..., Any]


@pytest.fixture
def above(monkeypatch: pytest.MonkeyPatch) -> Above:
    """Starts labs above tiers, one after another, with the model of ``other``, which is at rest meanwhile."""

    @asynccontextmanager
    async def start(other: Lab, **tiers: Any) -> AsyncIterator[Lab]:
        monkeypatch.setattr("model_worker.worker.load", lambda *_: other.worker.model)
        lab = Lab(dtype=other.dtype, l1_bytes=L1_BYTES, store=await open_store(TierSettings(**tiers)))
        await lab.engine.start()
        yield lab
        await lab.settle()
        lab.check_at_rest()
        await lab.engine.stop(grace_s=0.0)

    return start


async def check_came_from(tier: str, lab: Lab, prompt: list[int], cold: Answer) -> None:
    """All that a hit can have comes from the tier, with the bits of a cold run."""
    answer = await lab.answer(prompt, num_tokens=NUM_TOKENS)
    hit_tokens = lab.num_boundaries(prompt) * lab.block_size
    assert answer.record.fetched_tokens_by_tier == {tier: hit_tokens}
    assert answer.record.cached_prompt_tokens == hit_tokens
    assert_same_bits(answer, cold)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
async def test_blocks_of_other_workers_and_of_earlier_ones_have_cold_bits(
    labs: Labs, above: Above, tmp_path: Path, dtype: str
) -> None:
    lab = await labs.open(dtype)
    prompt = demo_prompt(lab, PROMPT)
    cold = await lab.cold(prompt, num_tokens=NUM_TOKENS)
    await lab.settle()
    disk = tmp_path / "disk"
    with running_valkey(tmp_path / "valkey") as server:
        redis = RemoteOptions(server.url, deadline_s=5.0)
        async with above(lab, redis=redis) as first:
            await first.answer(prompt, num_tokens=1)
        async with above(lab, redis=redis, disk=disk) as second:
            await check_came_from("redis", second, prompt, cold)
        async with above(lab, redis=redis, disk=disk) as third:
            await check_came_from("disk", third, prompt, cold)

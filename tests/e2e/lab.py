"""The demo model under observation: every answer comes with the logits its tokens were drawn from.

A ``Lab`` is a started engine of one dtype. It brings the cache into a known state,
puts a request into a chosen slot and remembers each prompt's cold answer.
"""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from model_worker.config import WorkerSettings
from model_worker.engine.engine import Engine
from model_worker.engine.request import Finished, GenerateRequest, StopConditions, TokensGenerated
from model_worker.kv.slots import Slot
from model_worker.worker import Worker, build
from prefixcache.accounting import RequestRecord
from prefixcache.core.blocks import num_reusable_blocks
from prefixcache.storage.tiered import TieredStore
from tests.prompts import Prompt, prompts

DEMO_MODEL = "smollm2-135m"
NUM_TOKENS = 8
NUM_SLOTS = 8
NUM_PROMPTS = 40
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Answer:
    """What one request gave; ``logits`` is ``[num_tokens, vocab_size]``, row i drew token i."""

    token_ids: list[int]
    text: str
    logits: Tensor
    slot: int
    record: RequestRecord


@dataclass
class Observed:
    """Logits and slot of one running request."""

    slot: int = -1
    logits: list[Tensor] = field(default_factory=list)


class Lab:
    """One worker on the demo model, watched. Requests get their slots in order of arrival."""

    def __init__(self, *, dtype: str, l1_bytes: int = 1 << 28, store: TieredStore | None = None) -> None:
        settings = WorkerSettings(
            model=DEMO_MODEL,
            device="cpu",
            dtype=dtype,
            max_num_seqs=NUM_SLOTS,
            l1_bytes=l1_bytes,
            max_reorder_wait_s=0.0,
        )
        self.worker: Worker = build(settings, observe_logits=self._observe, store=store)
        self.dtype = dtype
        self._observed: defaultdict[str, Observed] = defaultdict(Observed)
        self._cold: dict[tuple[int, ...], Answer] = {}
        self._numbers = count()

    @property
    def engine(self) -> Engine:
        return self.worker.engine

    @property
    def block_size(self) -> int:
        return self.engine.description.block_size

    def encode(self, text: str) -> list[int]:
        return self.engine.tokenizer.encode_text(text)

    def num_boundaries(self, prompt: list[int]) -> int:
        """The most blocks of ``prompt`` that a hit can have."""
        return num_reusable_blocks(len(prompt), self.block_size)

    async def answer(
        self, prompt: list[int], *, num_tokens: int = NUM_TOKENS, ignore_eos: bool = True, priority: int = 0
    ) -> Answer:
        """Run one greedy request to its end."""
        name = f"r{next(self._numbers)}"
        stopping = StopConditions(max_new_tokens=num_tokens, ignore_eos=ignore_eos)
        token_ids: list[int] = []
        text = ""
        request = GenerateRequest(name, list(prompt), stopping=stopping, priority=priority)
        async for event in self.engine.generate(request):
            if isinstance(event, TokensGenerated):
                token_ids += event.token_ids
                text += event.text
            elif isinstance(event, Finished):
                observed = self._observed.pop(name)
                return Answer(token_ids, text, torch.stack(observed.logits), observed.slot, event.record)
        raise AssertionError("the stream ended without its last event")

    async def cold(self, prompt: list[int], *, num_tokens: int = NUM_TOKENS) -> Answer:
        """The answer of an empty cache and an otherwise idle engine, computed once; at least ``num_tokens`` tokens."""
        key = tuple(prompt)
        known = self._cold.get(key)
        if known is None or len(known.token_ids) < num_tokens:
            await self.empty()
            known = await self.answer(prompt, num_tokens=num_tokens)
            assert known.record.cached_prompt_tokens == 0
            self._cold[key] = known
        return known

    def cold_before(self, prompt: list[int]) -> Answer:
        """The cold answer that ``cold`` gave before."""
        return self._cold[tuple(prompt)]

    async def empty(self) -> None:
        """An empty cache and an idle engine."""
        self.engine.clear()
        await self.settle()

    async def settle(self) -> None:
        """Wait until nothing waits, runs or is to be recomputed."""
        async with asyncio.timeout(PATIENCE_S):
            while self._is_busy():  # noqa: ASYNC110 -- the engine has gauges, no event
                await asyncio.sleep(0.001)

    async def all_decode(self) -> None:
        """Wait until a sequence decodes in every slot."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.engine._loop.scheduler.decoding()) < NUM_SLOTS:  # noqa: ASYNC110 -- as above
                await asyncio.sleep(0.001)

    async def keep_blocks(self, num_blocks: int) -> None:
        """Evict down to ``num_blocks`` blocks, from the ends of prompts."""
        await self.settle()
        self.engine.evict(num_blocks * self.engine.description.block_bytes)

    async def ensure_cached(self, prompt: list[int]) -> None:
        """Have all whole blocks of ``prompt`` in the cache."""
        found = self.engine.lookup(prompt, cache_salt="")
        if found.cached_blocks < found.num_blocks:
            await self.answer(prompt, num_tokens=1)

    async def warm_by_another(self, prompt: list[int], *, num_blocks: int) -> None:
        """Have a request that begins as ``prompt`` and goes on otherwise compute its first ``num_blocks`` blocks."""
        if num_blocks:
            place = num_blocks * self.block_size
            other_tail = [token + 1 for token in prompt[place : place + self.block_size // 2]]
            await self.answer(prompt[:place] + other_tail, num_tokens=1)

    def use_slot(self, index: int) -> None:
        """Make slot ``index`` the next one that is taken, then those after it; the engine is idle."""
        slots = self.worker.slots
        taken = [slots.take() for _ in range(slots.num_free)]
        assert len(taken) == slots.num_slots, "the engine is not idle"
        for slot in sorted(taken, key=lambda slot: (slot.index - index) % slots.num_slots, reverse=True):
            slots.give_back(slot)

    def check_at_rest(self) -> None:
        """Assert that nothing runs, no slot is taken and the cache holds nothing but published blocks, none leased."""
        stats = self.engine.stats()
        assert not self._is_busy()
        assert stats.engine.num_draining_slots == 0
        assert stats.cache.num_held_blocks == 0
        assert stats.cache.used_bytes == stats.cache.num_blocks * stats.cache.block_bytes
        self.worker.cache.check()

    def _is_busy(self) -> bool:
        gauges = self.engine.stats().engine
        return bool(
            gauges.num_waiting
            or gauges.num_running
            or gauges.num_parked
            or gauges.num_busy_slots
            or gauges.pending_recompute_tokens
        )

    def _observe(self, slot: Slot, logits: Tensor) -> None:
        """Runs on the model thread, while the loop waits for it: nobody joins or leaves the running sequences."""
        sequence = next(sequence for sequence in self.engine._loop.scheduler.running if sequence.run.slot is slot)
        observed = self._observed[sequence.request.request_id]
        observed.slot = slot.index
        observed.logits.append(logits.clone())


def chosen_prompts() -> list[Prompt]:
    """Forty real prompts by length of text, the longest last."""
    by_length = sorted(prompts(), key=lambda prompt: len(prompt.text))
    return [*by_length[: NUM_PROMPTS - 1], by_length[-1]]


def demo_prompt(lab: Lab, number: int) -> list[int]:
    """Chosen prompt ``number`` as tokens, 2 to 10 blocks."""
    encoded = lab.encode(chosen_prompts()[number].text)
    assert 2 <= len(encoded) / lab.block_size <= 10
    return encoded


def assert_same_bits(answer: Answer, cold: Answer) -> None:
    """Tokens equal and logits equal to the bit, over the tokens that ``answer`` has."""
    num_tokens = len(answer.token_ids)
    assert num_tokens > 0
    assert answer.token_ids == cold.token_ids[:num_tokens]
    for step in range(num_tokens):
        assert torch.equal(answer.logits[step], cold.logits[step]), f"the logits of token {step} differ"


async def assert_hit_has_cold_bits(
    lab: Lab, prompt: list[int], *, num_blocks: int, num_tokens: int = NUM_TOKENS
) -> Answer:
    """Exactly ``num_blocks`` blocks are taken from the cache, and the answer is the cold one."""
    answer = await lab.answer(prompt, num_tokens=num_tokens)
    assert answer.record.cached_prompt_tokens == num_blocks * lab.block_size
    assert_same_bits(answer, lab.cold_before(prompt))
    return answer

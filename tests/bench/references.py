"""Plain transformers under the same load: its static batch and its continuous batching."""

import asyncio
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from prefixcache.errors import PrefixCacheError
from prefixcache.load.conversation import Request
from prefixcache.load.plain_target import PlainTarget, plain_target
from tests.bench.load_client import Load
from tests.bench.timeline import Timeline


class StepTimes(StoppingCriteria):
    """Stops nothing; notes when each step of ``generate`` has chosen its tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: object, **_: object) -> torch.BoolTensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)  # type: ignore[return-value]


def static_batch(plain: PreTrainedModel, load: Load) -> Timeline:
    """``generate`` on all prompts, which are equally long, as one batch; all its tokens of a step arrive at once."""
    steps = StepTimes()
    ids = torch.tensor(load.prompts)
    generate: Any = plain.generate  # its annotated type is not callable
    begin = time.perf_counter()
    generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=load.num_tokens,
        min_new_tokens=load.num_tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([steps]),
    )
    arrivals = [at - begin for at in steps.times]
    return Timeline([arrivals] * len(load.prompts))


async def continuous_batching(load: Load, *, known: list[int], arguments: list[str]) -> Timeline:
    """Continuous batching with block sharing, in a process of its own, which first answers ``known``.

    ``arguments`` are more flags of ``model_worker.plain``.
    """
    fixed = ["--mode", "continuous", "--device", "cpu", "--ignore-eos"]
    with tempfile.TemporaryFile() as log:
        try:
            async with plain_target([*fixed, *arguments], log=log) as target:
                await target.send(Request(tuple(known), 1), lambda _: None)
                return await _send(target, load)
        except PrefixCacheError:
            log.seek(0)
            print(log.read().decode(errors="replace"), file=sys.stderr)
            raise


async def _send(target: PlainTarget, load: Load) -> Timeline:
    begin = time.perf_counter()
    arrivals: list[list[float]] = [[] for _ in load.prompts]

    async def send(number: int) -> None:
        def note(num_tokens: int) -> None:
            arrivals[number].extend([time.perf_counter() - begin] * num_tokens)

        await target.send(Request(tuple(load.prompts[number]), load.num_tokens), note)

    async with asyncio.TaskGroup() as group:
        for number in range(len(load.prompts)):
            group.create_task(send(number))
    return Timeline(arrivals)

"""Checks on a CUDA device what the exactness tests check on the CPU: ``python -m tests.bench.cuda [--model NAME]``.

One prompt cold, then a hit at every block boundary, then among others: tokens equal and
logits bit-equal, in bfloat16 and float32. Prints one line a dtype with the time to first
token cold and hit; exits 1 at the first difference.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor

from model_worker.config import WorkerSettings
from model_worker.engine.request import Finished, GenerateRequest, StopConditions
from model_worker.kv.slots import Slot
from model_worker.worker import Worker, build
from prefixcache.accounting import RequestRecord

BLOCK_SIZE = 64
NUM_BLOCKS = 6
STOP = StopConditions(max_new_tokens=8, ignore_eos=True)


class Watched:
    """A worker whose logits are kept by slot."""

    def __init__(self, model: str, dtype: str, device: str) -> None:
        self.logits: dict[int, list[Tensor]] = {}
        self._numbers = count()
        settings = WorkerSettings(model=model, dtype=dtype, device=device, block_size=BLOCK_SIZE, max_num_seqs=4)
        self.worker: Worker = build(settings, observe_logits=self._keep)

    def _keep(self, slot: Slot, logits: Tensor) -> None:
        self.logits.setdefault(slot.index, []).append(logits.float().cpu().clone())

    async def run(self, prompt: list[int]) -> tuple[RequestRecord, list[Tensor]]:
        """One request alone; its record and the logits of its tokens."""
        self.logits.clear()
        record = await self.finish(prompt)
        return record, list(next(iter(self.logits.values())))

    async def finish(self, prompt: list[int]) -> RequestRecord:
        """One request to its end."""
        request = GenerateRequest(f"check{next(self._numbers)}", prompt, stopping=STOP)
        async for event in self.worker.engine.generate(request):
            if isinstance(event, Finished):
                return event.record
        raise AssertionError("the stream ended without a record")


def same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether all logits are equal to the bit."""
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


async def check(model: str, dtype: str, *, device: str, tell: Callable[[str], None] = print) -> bool:
    """Run the checks for one dtype; False at the first difference."""
    watched = Watched(model, dtype, device)
    engine = watched.worker.engine
    await engine.start()
    try:
        draw = random.Random(7)
        ids = [draw.randrange(min(engine.description.vocab_size, 1_000)) for _ in range(NUM_BLOCKS * BLOCK_SIZE + 9)]
        cold, reference = await watched.run(ids)
        record = cold
        for num_blocks in range(1, NUM_BLOCKS + 1):
            engine.clear()
            await watched.finish([*ids[: num_blocks * BLOCK_SIZE], 1])
            record, logits = await watched.run(ids)
            if record.cached_prompt_tokens != num_blocks * BLOCK_SIZE or not same(logits, reference):
                tell(f"{dtype}: a hit of {num_blocks} blocks differs from the cold run")
                return False
        others = [asyncio.create_task(watched.finish([*ids[: 100 + 40 * place], place])) for place in range(3)]
        watched.logits.clear()
        await asyncio.gather(watched.finish(ids), *others)
        if not any(same(logits, reference) for logits in watched.logits.values()):
            tell(f"{dtype}: among others the logits differ from those alone")
            return False
        tell(f"{dtype}: exact; first token {cold.ttft_s * 1e3:.1f} ms cold, {record.ttft_s * 1e3:.1f} ms on a hit")
        return True
    finally:
        await engine.stop(grace_s=0.0)


def main() -> int:
    """Check both dtypes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    flags = parser.parse_args()
    return (
        0
        if all(asyncio.run(check(flags.model, dtype, device=flags.device)) for dtype in ("bfloat16", "float32"))
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())

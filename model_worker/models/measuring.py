"""How near the machine's limits a model runs: its prefill against matrix products, its decode against memory reads.

A ``Meter`` is a list of short pieces for the model thread, run between the engine's own
operations; it has buffers and KV of its own, and touches nothing that the engine owns.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from model_worker.models.costs import decode_bytes, prefill_ops
from model_worker.models.decode_attention import Partition
from model_worker.models.linear import packed_linears
from model_worker.models.loading import LoadedModel
from model_worker.models.row_probe import padded_rows
from model_worker.models.trial import Row, Trial, walk_tokens
from prefixcache.config import format_size
from prefixcache.errors import CapacityExceeded

BUDGET_S = 0.3
BUFFER_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
CHUNK_BYTES = 16 << 20
VECTOR_SIZE = 4_096
MATRIX_SIZE = {"cpu": 1_024, "cuda": 8_192}


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured; fields as in the message of the same name."""

    compute_dtype: str
    num_threads: int
    matrix_ops_per_s: float
    memory_bytes_per_s: float
    buffer_bytes: int
    prefill_tokens: int
    prefill_ops: int
    prefill_s: float
    prefill_ops_per_s: float
    prefill_share: float
    decode_context_tokens: int
    decode_bytes: int
    decode_s: float
    decode_bytes_per_s: float
    decode_share: float


class Timing:
    """An operation to be run again and again until that took ``budget_s``; keeps the shortest time."""

    def __init__(self, operation: Callable[[], object], *, device: torch.device, budget_s: float) -> None:
        self._operation = operation
        self._device = device
        self._budget_s = budget_s
        self.best_s = float("inf")
        self.total_s = 0.0

    @property
    def is_done(self) -> bool:
        """Whether it ran and the budget is spent."""
        return self._budget_s <= self.total_s > 0

    @torch.inference_mode()
    def run(self) -> None:
        """Run the operation once. Model thread only."""
        self._synchronize()
        started_at = time.perf_counter()
        self._operation()
        self._synchronize()
        took = time.perf_counter() - started_at
        self.best_s = min(self.best_s, took)
        self.total_s += took

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Workload:
    """What is timed: operations of ``model``, and of the machine on buffers of a fixed size. Model thread only."""

    def __init__(self, model: LoadedModel, *, allowed_rows: tuple[int, ...], partition: Partition | None) -> None:
        self._device = model.device
        self._num_rows = padded_rows(1, allowed_rows)
        self._trial = Trial(model.causal, model.layout, partition=partition)
        self._buffer = self._vector = self._matrix = self._kv = torch.empty(0)
        self.dtype = compute_dtype(model)
        self.matrix_size = MATRIX_SIZE[model.device.type]
        self.buffer_bytes = BUFFER_BYTES[model.device.type]
        self.token_ids = walk_tokens(model.layout.block_size, model.vocab_size)
        self.context = min(model.layout.block_size, model.max_positions - 1)

    @property
    def needed_bytes(self) -> int:
        """Memory it takes, KV apart."""
        return self.buffer_bytes + 2 * self.matrix_size**2 * self.dtype.itemsize

    @torch.inference_mode()
    def allocate(self) -> None:
        """Take the memory."""
        num_rows = self.buffer_bytes // VECTOR_SIZE // torch.float32.itemsize
        self._buffer = torch.empty(num_rows, VECTOR_SIZE, device=self._device)
        self._vector = torch.ones(VECTOR_SIZE, device=self._device)
        self._matrix = torch.full((self.matrix_size, self.matrix_size), 0.5, dtype=self.dtype, device=self._device)
        self._kv = self._trial.new_kv(max(len(self.token_ids), self.context + 1))

    @torch.inference_mode()
    def fill(self, start: int) -> None:
        """Write the part of the buffer that begins at byte ``start``; its pages are there afterwards."""
        size = torch.float32.itemsize
        self._buffer.flatten()[start // size : (start + CHUNK_BYTES) // size] = 1.0

    def multiply(self) -> Tensor:
        """The product of two matrices."""
        return self._matrix @ self._matrix

    def read(self) -> Tensor:
        """The product of the whole buffer, a matrix, and a vector."""
        return self._buffer @ self._vector

    def prefill(self) -> None:
        """One block at the start of a sequence, without the LM head."""
        self._trial.fill(self._kv, self.token_ids)

    def decode(self) -> None:
        """One token more for that sequence, alone in its batch."""
        self._trial.decode([Row(self._kv, self.token_ids[-1], self.context)], num_padded=self._num_rows)


class Meter:
    """One measurement of ``model``: run every piece of ``pieces`` in order on the model thread, then take ``result``.

    ``free_bytes`` are those of memory that nobody uses; CapacityExceeded where they are too few.
    """

    def __init__(
        self, model: LoadedModel, *, allowed_rows: tuple[int, ...], partition: Partition | None, free_bytes: int
    ) -> None:
        work = Workload(model, allowed_rows=allowed_rows, partition=partition)
        if free_bytes < 2 * work.needed_bytes:
            raise CapacityExceeded(
                f"measuring takes {format_size(work.needed_bytes)} of memory and only {format_size(free_bytes)} are "
                f"free; ask without measuring, or give the worker's machine more room"
            )
        self._model = model
        self._work = work
        operations = {"matrix": work.multiply, "memory": work.read, "prefill": work.prefill, "decode": work.decode}
        self._timings = {
            name: Timing(operation, device=model.device, budget_s=BUDGET_S) for name, operation in operations.items()
        }

    def pieces(self) -> Iterator[Callable[[], None]]:
        """The pieces of work; each a fraction of a second, or as long as a block or a step of the model takes."""
        yield self._work.allocate
        for start in range(0, self._work.buffer_bytes, CHUNK_BYTES):
            yield partial(self._work.fill, start)
        for timing in self._timings.values():
            while not timing.is_done:
                yield timing.run

    def result(self) -> Measurement:
        """What the pieces, all of them run, have found. Model thread only."""
        work, best = self._work, {name: timing.best_s for name, timing in self._timings.items()}
        num_tokens = len(work.token_ids)
        num_ops, num_bytes = prefill_ops(self._model, num_tokens), decode_bytes(self._model, work.context + 1)
        matrix_rate, memory_rate = 2 * work.matrix_size**3 / best["matrix"], work.buffer_bytes / best["memory"]
        return Measurement(
            compute_dtype=str(work.dtype).removeprefix("torch."),
            num_threads=torch.get_num_threads(),
            matrix_ops_per_s=matrix_rate,
            memory_bytes_per_s=memory_rate,
            buffer_bytes=work.buffer_bytes,
            prefill_tokens=num_tokens,
            prefill_ops=num_ops,
            prefill_s=best["prefill"],
            prefill_ops_per_s=num_ops / best["prefill"],
            prefill_share=num_ops / best["prefill"] / matrix_rate,
            decode_context_tokens=work.context,
            decode_bytes=num_bytes,
            decode_s=best["decode"],
            decode_bytes_per_s=num_bytes / best["decode"],
            decode_share=num_bytes / best["decode"] / memory_rate,
        )


def compute_dtype(model: LoadedModel) -> torch.dtype:
    """The type in which most of the model's weights are multiplied."""
    kernels = [layer.kernel for layer in packed_linears(model.causal.model)]
    if not kernels:
        return model.causal.model.dtype
    return max(kernels, key=lambda kernel: kernel.packed_bytes).dtype

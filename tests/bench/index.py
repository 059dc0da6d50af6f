"""Speed and size of the radix index: ``python -m tests.bench.index [--format json]``.

Microseconds a call, medians over the calls of a workload, for blocks of 64 and 16 tokens.
Tokens are in the form the engine keeps them, little-endian uint32 bytes; ``convert_us`` (from
a list of ints) and ``hash_us`` (the SHA-256 chain) are what a request pays once besides.
``insert_us`` is publishing a whole prompt the way the cache does: match, hold, insert,
release. Workloads: ``shared`` 1,000 prompts of 2,000 tokens of which 1,500 are common;
``chats`` 200 chats of 10 turns of 200 tokens; ``long`` one prompt of 32,768 tokens matched
100 times; ``memory`` bytes a million cached tokens, token bytes included, over 500
unrelated prompts of 2,000 tokens.
"""

import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator

from prefixcache.core.blocks import block_hashes, token_bytes
from prefixcache.core.radix import RadixIndex
from tests.bench.harness import arguments, median, report

ROOT = bytes(32)
BLOCK_SIZES = (64, 16)
TOKEN_BYTES = 4


def ids(draw: random.Random, num_tokens: int) -> list[int]:
    """Random token ids of a large vocabulary."""
    return [draw.randrange(128_000) for _ in range(num_tokens)]


def shared_prompts() -> Iterator[list[int]]:
    """1,000 prompts with a common head of 1,500 tokens."""
    draw = random.Random(1)
    head = ids(draw, 1_500)
    return (head + ids(draw, 500) for _ in range(1_000))


def chat_prompts() -> Iterator[list[int]]:
    """200 chats, each turn 200 tokens longer than the one before; the chats take turns."""
    draw = random.Random(2)
    chats: list[list[int]] = [[] for _ in range(200)]
    for _ in range(10):
        for chat in chats:
            chat.extend(ids(draw, 200))
            yield list(chat)


def unrelated_prompts() -> Iterator[list[int]]:
    """500 prompts of 2,000 tokens without anything in common."""
    draw = random.Random(3)
    return (ids(draw, 2_000) for _ in range(500))


def timed(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    started_at = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started_at) / 1_000


def publish(index: RadixIndex, tokens: bytes, next_cell: int) -> int:
    """Insert all full blocks of ``tokens`` that are missing; the number of them."""
    num_blocks = len(tokens) // (index.block_size * TOKEN_BYTES)
    hold = index.hold(index.match(ROOT, tokens, max_blocks=num_blocks))
    missing = num_blocks - hold.num_blocks
    index.insert(hold, tokens, range(next_cell, next_cell + missing))
    index.release(hold)
    return missing


def measure_prompts(block_size: int, prompts: Iterator[list[int]]) -> dict[str, float]:
    """Match and insert each prompt in turn."""
    index = RadixIndex(block_size)
    times: dict[str, list[float]] = {"convert": [], "hash": [], "match": [], "insert": []}
    cell = 0
    for prompt in prompts:
        tokens = token_bytes(prompt)
        times["convert"].append(timed(lambda p=prompt: token_bytes(p)))  # type: ignore[misc]
        times["hash"].append(timed(lambda t=tokens: block_hashes(ROOT, t, block_size)))  # type: ignore[misc]
        times["match"].append(timed(lambda t=tokens: index.match(ROOT, t)))  # type: ignore[misc]
        started_at = time.perf_counter_ns()
        cell += publish(index, tokens, cell)
        times["insert"].append((time.perf_counter_ns() - started_at) / 1_000)
    index.check()
    return {f"{name}_us": median(values) for name, values in times.items()}


def measure_long(block_size: int) -> dict[str, float]:
    """One long prompt, inserted five times into an empty index and matched 100 times."""
    tokens = token_bytes(ids(random.Random(4), 32_768))
    inserts = []
    for _ in range(5):
        index = RadixIndex(block_size)
        inserts.append(timed(lambda index=index: publish(index, tokens, 0)))  # type: ignore[misc]
    return {
        "convert_us": median([timed(lambda: token_bytes([*memoryview(tokens).cast("I")])) for _ in range(5)]),
        "hash_us": median([timed(lambda: block_hashes(ROOT, tokens, block_size)) for _ in range(5)]),
        "match_us": median([timed(lambda: index.match(ROOT, tokens)) for _ in range(100)]),
        "insert_us": median(inserts),
    }


def measure_memory(block_size: int) -> float:
    """Megabytes of index and token bytes for a million cached tokens."""
    prompts = [token_bytes(prompt) for prompt in unrelated_prompts()]
    gc.collect()
    tracemalloc.start()
    index = RadixIndex(block_size)
    cell = 0
    for tokens in prompts:
        cell += publish(index, bytes(bytearray(tokens)), cell)
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / (cell * block_size)


def main() -> int:
    """Measure and print."""
    flags = arguments(__doc__)
    rows: list[dict[str, float | str]] = []
    for block_size in BLOCK_SIZES:
        workloads = {
            "shared": measure_prompts(block_size, shared_prompts()),
            "chats": measure_prompts(block_size, chat_prompts()),
            "long": measure_long(block_size),
        }
        rows += [{"block_size": block_size, "workload": name, **figures} for name, figures in workloads.items()]
    memory = {f"memory_mb_per_million_tokens_{size}": measure_memory(size) for size in BLOCK_SIZES}
    report(rows, dict(memory), output=flags.format)
    return 0


if __name__ == "__main__":
    sys.exit(main())

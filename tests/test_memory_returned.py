import ctypes

import psutil
import pytest

from model_worker.worker import give_memory_back

PIECE_BYTES = 64 << 10
NUM_PIECES = 2_000


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_freed_memory_below_a_block_in_use_goes_back_to_the_system() -> None:
    process = psutil.Process()
    num_before = process.memory_info().rss
    pieces = [bytearray(b"x") * PIECE_BYTES for _ in range(NUM_PIECES)]
    num_full = process.memory_info().rss
    top = pieces.pop()
    pieces.clear()
    give_memory_back()
    grown, left = num_full - num_before, process.memory_info().rss - num_before
    assert top
    assert left < grown / 4

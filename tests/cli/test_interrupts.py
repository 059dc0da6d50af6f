"""An interrupt gets through even where something below Python swallows it."""

import os
import signal
import time
from contextlib import suppress

import pytest

from prefixcache.cli.worker_process import repeated_interrupts


def interrupt_oneself(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(5)


def swallow_the_first(number: int) -> None:
    with suppress(KeyboardInterrupt):
        interrupt_oneself(number)
    time.sleep(30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_swallowed_interrupt_comes_again(number: int) -> None:
    started_at = time.monotonic()
    with pytest.raises(KeyboardInterrupt), repeated_interrupts():
        swallow_the_first(number)
    assert time.monotonic() - started_at < 20


def test_nothing_comes_after_the_block_and_handlers_are_back() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(KeyboardInterrupt), repeated_interrupts():
        interrupt_oneself(signal.SIGINT)
    time.sleep(1.5)
    assert [signal.getsignal(number) for number in numbers] == before

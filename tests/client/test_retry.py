import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest

from prefixcache.client.retry import Retrier, RetryPolicy
from prefixcache.rpc.status import REQUEST_ID_KEY

FAR_S = 1e9


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.waits_s: list[float] = []

    def read(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.waits_s.append(seconds)
        self.now_s += seconds


def failing(
    *codes: grpc.StatusCode, clock: Clock, cost_s: float = 0.0, is_begun: bool = True
) -> Callable[[float | None], Awaitable[str]]:
    left = list(codes)
    metadata = grpc.aio.Metadata((REQUEST_ID_KEY, "r1")) if is_begun else grpc.aio.Metadata()

    async def attempt(remaining_s: float | None) -> str:
        clock.now_s += cost_s
        if left:
            raise grpc.aio.AioRpcError(left.pop(0), metadata, metadata)
        return f"{remaining_s}"

    return attempt


def retrier(clock: Clock, *, retries: int = 3, draw: float = 0.0) -> Retrier:
    return Retrier(RetryPolicy(retries=retries), clock=clock.read, sleep=clock.sleep, draw=lambda: draw)


def test_waits_double_up_to_the_longest() -> None:
    policy = RetryPolicy(retries=10)
    waits = [policy.wait_s(number, remaining_s=FAR_S, draw=1.0) for number in range(1, 8)]
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])


@pytest.mark.parametrize(("draw", "wait_s"), [(0.0, 0.05), (0.5, 0.075), (1.0, 0.1)])
def test_jitter_takes_between_half_and_all_of_the_backoff(draw: float, wait_s: float) -> None:
    assert RetryPolicy().wait_s(1, remaining_s=FAR_S, draw=draw) == pytest.approx(wait_s)


def test_gives_up_after_the_allowed_retries() -> None:
    assert RetryPolicy(retries=2).wait_s(2, remaining_s=FAR_S, draw=0.0) is not None
    assert RetryPolicy(retries=2).wait_s(3, remaining_s=FAR_S, draw=0.0) is None


def test_a_wait_longer_than_the_time_left_is_not_started() -> None:
    assert RetryPolicy().wait_s(1, remaining_s=0.05, draw=0.0) is None


def test_huge_failure_counts_do_not_overflow() -> None:
    assert RetryPolicy(retries=10**6).wait_s(10**4, remaining_s=FAR_S, draw=1.0) == 2.0


def test_unavailable_is_tried_again_with_the_time_that_is_left() -> None:
    clock = Clock()
    attempt = failing(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE, clock=clock, cost_s=1.0)
    answer = asyncio.run(retrier(clock).run(attempt, timeout_s=10.0))
    assert clock.waits_s == pytest.approx([0.05, 0.1])
    assert float(answer) == pytest.approx(10.0 - 2.0 - 0.15)


def test_the_last_failure_is_raised() -> None:
    clock = Clock()
    attempt = failing(*[grpc.StatusCode.UNAVAILABLE] * 5, clock=clock)
    with pytest.raises(grpc.aio.AioRpcError):
        asyncio.run(retrier(clock, retries=2).run(attempt, timeout_s=None))
    assert len(clock.waits_s) == 2


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.UNAVAILABLE])
def test_no_other_status_is_tried_again(code: grpc.StatusCode) -> None:
    clock = Clock()
    with pytest.raises(grpc.aio.AioRpcError):
        asyncio.run(retrier(clock).run(failing(code, clock=clock), timeout_s=10.0))
    assert clock.waits_s == []


def test_a_call_cancelled_before_it_was_begun_is_tried_again() -> None:
    clock = Clock()
    attempt = failing(grpc.StatusCode.CANCELLED, clock=clock, is_begun=False)
    asyncio.run(retrier(clock).run(attempt, timeout_s=10.0))
    assert clock.waits_s == pytest.approx([0.05])


def test_retries_end_with_the_deadline() -> None:
    clock = Clock()
    attempt = failing(*[grpc.StatusCode.UNAVAILABLE] * 9, clock=clock, cost_s=0.5)
    with pytest.raises(grpc.aio.AioRpcError):
        asyncio.run(retrier(clock, retries=8).run(attempt, timeout_s=1.2))
    assert clock.now_s <= 100.0 + 1.2 + 0.5


def test_no_deadline_is_passed_on_as_none() -> None:
    assert asyncio.run(retrier(Clock()).run(failing(clock=Clock()), timeout_s=None)) == "None"

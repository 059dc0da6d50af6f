import asyncio

import pytest

from model_worker.engine.request import Finished, Progress, Started, TokenLogprobs, TokensGenerated
from model_worker.engine.sequence import Mailbox
from prefixcache.accounting import RequestRecord
from prefixcache.errors import InternalError

FINISHED = Finished(RequestRecord("r"))


def mailbox_with(*events: Started | Progress | TokensGenerated | Finished | InternalError) -> Mailbox:
    mailbox = Mailbox()
    for event in events:
        mailbox.put(event)
    return mailbox


async def test_events_come_in_order_and_tokens_that_pile_up_are_joined() -> None:
    mailbox = mailbox_with(
        Started(3, 0), TokensGenerated([1], "a"), TokensGenerated([2], ""), TokensGenerated([3], "bc"), FINISHED
    )
    assert await mailbox.get() == Started(3, 0)
    assert await mailbox.get() == TokensGenerated([1, 2, 3], "abc")
    assert await mailbox.get() is FINISHED


async def test_joined_tokens_keep_their_logprobs_in_order() -> None:
    first, second = TokenLogprobs(-1.0, ((1, -1.0),)), TokenLogprobs(-2.0, ())
    mailbox = mailbox_with(TokensGenerated([1], "a", [first]), TokensGenerated([2], "b", [second]))
    assert await mailbox.get() == TokensGenerated([1, 2], "ab", [first, second])


async def test_tokens_that_pile_up_are_joined_by_sample_and_the_last_says_how_it_ended() -> None:
    ended = TokensGenerated([3], "c", sample=1, finish_reason="stop_text", matched_stop="d")
    mailbox = mailbox_with(
        TokensGenerated([1], "a", sample=1), TokensGenerated([9], "x"), TokensGenerated([2], "b", sample=1), ended
    )
    mailbox.put(FINISHED)
    assert await mailbox.get() == TokensGenerated([1, 2, 3], "abc", [], 1, "stop_text", "d")
    assert await mailbox.get() == TokensGenerated([9], "x")
    assert await mailbox.get() is FINISHED


async def test_of_progress_that_piles_up_the_newest_comes() -> None:
    mailbox = mailbox_with(Progress(8, 30), Progress(16, 30), Progress(24, 30), TokensGenerated([1], "a"), FINISHED)
    assert await mailbox.get() == Progress(24, 30)
    assert await mailbox.get() == TokensGenerated([1], "a")
    assert await mailbox.get() is FINISHED


async def test_an_error_is_raised_after_the_tokens_before_it() -> None:
    mailbox = mailbox_with(TokensGenerated([1], "a"), InternalError("broken"))
    assert await mailbox.get() == TokensGenerated([1], "a")
    with pytest.raises(InternalError, match="broken"):
        await mailbox.get()


async def test_a_reader_waits_for_what_comes_and_loses_nothing_when_cancelled() -> None:
    mailbox = Mailbox()
    waiting = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    mailbox.put(Started(1, 0))
    assert await mailbox.get() == Started(1, 0)

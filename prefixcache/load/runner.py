"""Sends load to a target: as a closed loop of so many clients, or as an open loop by the clock.

In an open loop a conversation begins at its planned time whatever the target does; its
later turns follow at once on the answers before them. One event loop owns everything here.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from prefixcache.errors import PrefixCacheError
from prefixcache.load.clock import Clock
from prefixcache.load.conversation import Answer, Conversation, Planned, Request
from prefixcache.load.sample import NOT_SENT, OK, Sample
from prefixcache.load.status import status_name
from prefixcache.load.target import Target

MAX_IN_FLIGHT: Final = 10_000
FAILURE_PAUSE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Limits:
    """When no further request is started; those under way are waited for. None: no such limit."""

    num_requests: int | None = None
    duration_s: float | None = None


class Runner:
    """One run against one target; ``samples`` has its requests in the order of their start."""

    def __init__(self, target: Target, clock: Clock, limits: Limits) -> None:
        self._target = target
        self._clock = clock
        self._limits = limits
        self._start_s = clock.now()
        self._num_in_flight = 0
        self.samples: list[Sample] = []

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self._clock.now() - self._start_s

    async def run_closed(self, planned: Iterator[Planned], *, concurrency: int) -> None:
        """Let ``concurrency`` clients each hold one conversation after another; planned times are not used."""
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._hold_conversations(planned))

    async def run_open(self, planned: Iterator[Planned]) -> None:
        """Begin each conversation at its time, however many are under way."""
        async with asyncio.TaskGroup() as group:
            for each in planned:
                first = next(each.conversation, None)  # the prompt is made before it is due
                if first is None or not self._may_start(each.at_s):
                    break
                await self._clock.sleep_until(self._start_s + each.at_s)
                if self._num_in_flight >= MAX_IN_FLIGHT:
                    self._note_unsent(each.at_s)
                    continue
                group.create_task(self._hold(each.conversation, first, planned_s=each.at_s))
                await asyncio.sleep(0)  # a late generator still lets the task send

    async def _hold_conversations(self, planned: Iterator[Planned]) -> None:
        while self._may_start(planned_s := self.elapsed_s):
            each = next(planned, None)
            first = None if each is None else next(each.conversation, None)
            if each is None or first is None:
                return
            if not await self._hold(each.conversation, first, planned_s=planned_s):
                await self._clock.sleep_until(self._clock.now() + FAILURE_PAUSE_S)

    async def _hold(self, conversation: Conversation, first: Request, *, planned_s: float) -> bool:
        """Send a conversation's requests one after another; False where one failed."""
        request: Request | None = first
        while request is not None and self._may_start(planned_s):
            answer = await self._send(request, planned_s)
            if answer is None:
                conversation.close()
                return False
            planned_s, request = self.elapsed_s, _next_request(conversation, answer)
        return True

    async def _send(self, request: Request, planned_s: float) -> Answer | None:
        sample = Sample(planned_s, sent_s=self.elapsed_s)
        self.samples.append(sample)
        self._num_in_flight += 1
        try:
            answer = await self._target.send(request, lambda number: sample.arrivals.append((self.elapsed_s, number)))
        except PrefixCacheError as error:
            sample.status, sample.message = status_name(error), str(error)
            return None
        finally:
            sample.end_s = self.elapsed_s
            self._num_in_flight -= 1
        sample.status = OK
        sample.prompt_tokens, sample.cached_prompt_tokens = answer.prompt_tokens, answer.cached_prompt_tokens
        sample.completion_tokens = len(answer.token_ids)
        return answer

    def _may_start(self, planned_s: float) -> bool:
        limits = self._limits
        is_counted_out = limits.num_requests is not None and len(self.samples) >= limits.num_requests
        return not is_counted_out and (limits.duration_s is None or planned_s < limits.duration_s)

    def _note_unsent(self, planned_s: float) -> None:
        now_s = self.elapsed_s
        self.samples.append(Sample(planned_s, now_s, NOT_SENT, f"{MAX_IN_FLIGHT} requests were under way", end_s=now_s))


def _next_request(conversation: Conversation, answer: Answer) -> Request | None:
    try:
        return conversation.send(answer)
    except StopIteration:
        return None

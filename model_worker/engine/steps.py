"""The steps of a sequence from its slot to its tokens, each at most one operation on the model thread.

Called by the engine's loop, one step at a time.
"""

import asyncio
import logging
from collections.abc import Callable

from model_worker.engine.endings import Endings
from model_worker.engine.request import Progress, Started
from model_worker.engine.runner import DecodeRow
from model_worker.engine.sequence import Phase, Sequence
from model_worker.engine.state import EngineState

logger = logging.getLogger(__name__)


class Steps:
    """Takes sequences on, one step a call. ``on_fetched`` is called when blocks came up from the tiers."""

    def __init__(self, state: EngineState, endings: Endings, *, on_fetched: Callable[[], None]) -> None:
        self._state = state
        self._endings = endings
        self._on_fetched = on_fetched
        self._last_prefilled: Sequence | None = None

    async def enter(self, sequence: Sequence) -> None:
        """Give a sequence that runs from now on its slot; one that was parked goes on where it was."""
        if sequence.phase is Phase.PARKED:
            await self._state.parking.unpark(sequence)
        else:
            await self._admit(sequence)

    async def park(self, sequence: Sequence) -> None:
        """Take a running sequence off its slot; one that is abandoned meanwhile is left to be reaped."""
        await self._state.parking.park(sequence)
        if not sequence.is_abandoned:
            self._state.scheduler.park(sequence)

    async def _admit(self, sequence: Sequence) -> None:
        """Give the sequence a slot and hold what is cached of its prompt; where tiers may have more, ask them."""
        record, clock, promoter = sequence.record, self._state.clock, self._state.promoter
        started_at = clock()
        sequence.admitted_at = started_at
        record.queue_s = started_at - sequence.arrived_at
        self._state.canonical.match(sequence.run, self._state.parts.slots.take())
        record.lookup_s = clock() - started_at
        if promoter.note_match(sequence.run):
            sequence.phase = Phase.FETCH
            sequence.fetch = asyncio.create_task(self._fetch(sequence), name=f"fetch for {record.request_id}")
            sequence.fetch.add_done_callback(lambda _task: self._note_fetched(sequence))
        else:
            sequence.phase = Phase.READY

    async def begin(self, sequence: Sequence) -> None:
        """Copy what is cached by now into the slot; prefill goes on from there."""
        record, canonical, clock = sequence.record, self._state.canonical, self._state.clock
        started_at = clock()
        sequence.phase = Phase.PREFILL
        record.cached_prompt_tokens = canonical.match_again(sequence.run)
        if sequence.request.only_warms and canonical.is_whole(sequence.run):
            record.cached_prompt_tokens = len(sequence.run)
            self._endings.finish_warming(sequence)
            return
        if sequence.number == 0:
            by_tier = record.cached_prompt_tokens_by_tier
            sequence.mailbox.put(Started(record.prompt_tokens, record.cached_prompt_tokens, by_tier))
        await canonical.load(sequence.run)
        record.load_s = clock() - started_at
        self._last_prefilled = sequence

    async def prefill(self, sequence: Sequence, *, num_blocks: int) -> None:
        """Compute ``num_blocks`` blocks of the prompt in one forward, or what is left of it and the first token."""
        run = sequence.run
        only_warms = sequence.request.only_warms
        if self._last_prefilled is not sequence:
            await self._catch_up(sequence)
        token = await self._advance(sequence, num_blocks=num_blocks)
        if sequence.is_abandoned:
            return
        if only_warms and not self._state.canonical.can_publish_more(run):
            self._endings.finish_warming(sequence)
            return
        if token is None:
            if sequence.request.report_progress and sequence.number == 0:
                sequence.mailbox.put(Progress(run.num_computed, len(run)))
            return
        self._state.promoter.pass_on(run)
        self._state.canonical.release_lease(run)
        record, ledger = sequence.record, self._state.ledger
        record.saved_s = ledger.saved_s(record.cached_prompt_tokens, record.load_s + record.fetch_s)
        sequence.phase = Phase.DECODE
        sequence.first_token_at = self._state.clock()
        self._deliver(sequence, token)

    async def decode(self, sequences: list[Sequence]) -> None:
        """Compute the next token of each sequence."""
        rows = [decode_row(sequence, block_size=self._state.limits.block_size) for sequence in sequences]
        tokens = await self._state.parts.thread.run(self._state.parts.runner.decode, rows)
        drawn = zip(sequences, tokens, strict=True)
        for sequence, token in [pair for pair in drawn if not pair[0].is_abandoned]:
            if isinstance(token, Exception):
                self._endings.fail_alone(sequence, token)
            else:
                self._deliver(sequence, token)

    async def _fetch(self, sequence: Sequence) -> None:
        """Let the tiers extend the sequence's lease; its prompt is computed next, whatever came of this."""
        cost = self._state.ledger.prefill_s_per_token
        try:
            await self._state.promoter.promote(sequence.run, sequence.record, compute_s_per_token=cost)
        except Exception:
            logger.exception("fetching for request %s failed; its blocks are computed", sequence.request.request_id)

    def _note_fetched(self, sequence: Sequence) -> None:
        sequence.fetch = None
        sequence.phase = Phase.READY
        self._on_fetched()

    async def _catch_up(self, sequence: Sequence) -> None:
        """Another prompt went in between: what it published of this one need not be computed."""
        started_at = self._state.clock()
        sequence.record.cached_prompt_tokens += await self._state.canonical.catch_up(sequence.run)
        sequence.record.load_s += self._state.clock() - started_at
        self._last_prefilled = sequence

    async def _advance(self, sequence: Sequence, *, num_blocks: int) -> int | None:
        run, record, clock = sequence.run, sequence.record, self._state.clock
        started_at = clock()
        num_before = run.num_computed
        sampler = None if sequence.request.only_warms else sequence.sampler
        token = await self._state.canonical.advance(run, sampler, num_blocks=num_blocks)
        took = clock() - started_at
        num_computed = run.num_computed - num_before
        self._state.ledger.note_prefill(num_computed, took)
        record.prefill_s += took
        record.computed_prompt_tokens += num_computed
        return token

    def _deliver(self, sequence: Sequence, token: int) -> None:
        sequence.output_ids.append(token)
        try:
            reason, text = self._state.admission.judge(sequence, token)
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is this request's alone
            self._endings.fail_alone(sequence, error)
            return
        sequence.deliver(token, text, finish_reason=reason)
        if reason:
            self._endings.finish(sequence, reason)


def decode_row(sequence: Sequence, *, block_size: int) -> DecodeRow:
    """The step of one sequence in a decode; what of its prompt are whole blocks may be read together with others'."""
    run = sequence.run
    assert run.slot is not None
    num_canonical = 0 if run.bypasses_cache else len(run) // block_size * block_size
    return DecodeRow(
        run.slot,
        sequence.output_ids[-1],
        sequence.next_position,
        sequence.sampler,
        root=run.root,
        tokens=run.tokens,
        num_canonical=num_canonical,
    )

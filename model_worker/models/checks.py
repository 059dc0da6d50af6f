"""The five checks of a loaded model: is a prefix's KV its own, whatever follows, came before or runs beside it?

Each takes a ``Subject`` and returns what it measured, or raises ``CheckFailed``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from model_worker.models.row_probe import padded_rows
from model_worker.models.trial import TOLERANCES, Row, Trial, distance, walk_tokens

Output = tuple[Tensor, Tensor]

CHAINED_BLOCKS = 3
COMPARED_ROWS = 16
CHAINED_QUANTILE = 0.75


class CheckFailed(Exception):
    """What was found where a check does not hold."""


@dataclass(frozen=True)
class Subject:
    """The model under test, the batches it will be run in, and what several checks look at.

    ``allowed_rows`` are the batch sizes of the row probe, ``max_rows`` the most sequences
    at once. A model ``has_experts`` whose prefill sends a block's tokens to them together:
    a later token may change the rounding of earlier ones.
    """

    trial: Trial
    allowed_rows: tuple[int, ...]
    max_rows: int
    storage_dtype: torch.dtype
    has_experts: bool
    max_positions: int

    def tokens(self, num_tokens: int, *, seed: int = 0) -> list[int]:
        """A fixed prompt; other seeds begin otherwise."""
        return walk_tokens(num_tokens, self.trial.vocab_size, start=seed)

    def decode(self, rows: list[Row]) -> Tensor:
        """Decode as the runner does."""
        return self.trial.decode(rows, num_padded=padded_rows(len(rows), self.allowed_rows))

    @cached_property
    def first(self) -> Output:
        """KV of a prompt of one block and the logits of its last two tokens, computed before any longer prompt."""
        return _prefilled(self, self.tokens(self.trial.block_size), num_logits=2)

    @cached_property
    def whole(self) -> Output:
        """KV and last logits of another prompt, of several blocks, in one forward; computed after ``first``."""
        assert self.first
        return _prefilled(self, self.longer_tokens)

    @property
    def longer_tokens(self) -> list[int]:
        """A fixed prompt of several blocks, as far as the model has positions for them."""
        return self.tokens(min(CHAINED_BLOCKS * self.trial.block_size, self.max_positions), seed=1)


def check_causality(subject: Subject) -> str:
    """A changed last token leaves the KV and logits of all tokens before it as they were."""
    size = subject.trial.block_size
    token_ids = subject.tokens(size)
    changed = [*token_ids[:-1], (token_ids[-1] + 1) % subject.trial.vocab_size]
    kv, logits = subject.first
    other_kv, other_logits = _prefilled(subject, changed, num_logits=2)
    kept = slice(size - 1)
    for before, after in ((kv[:, :, :, kept], other_kv[:, :, :, kept]), (logits[:-1], other_logits[:-1])):
        _require_equal(after, before, "a token's output depends on tokens after it", is_close=subject.has_experts)
    return f"{size - 1} tokens unchanged"


def check_chaining(subject: Subject) -> str:
    """Prefill block by block gives what one forward gives, within rounding, in every layer."""
    whole, whole_logits = subject.whole
    chained = torch.zeros_like(whole)
    chained_logits = subject.trial.prefill_blocks(chained, subject.longer_tokens)
    by_layer = [_typical_distance(_by_token(one), _by_token(other)) for one, other in zip(chained, whole, strict=True)]
    found = max([*by_layer, _typical_distance(chained_logits, whole_logits)])
    tolerance = TOLERANCES[subject.storage_dtype]
    if not found <= tolerance:
        raise CheckFailed(f"block by block differs from one pass by {found:.2g}, more than {tolerance:g}")
    return f"difference {found:.2g} of at most {tolerance:g}"


def check_history(subject: Subject) -> str:
    """A prompt has the same bits again after another, longer one."""
    first_kv, first_logits = subject.first
    num_others = subject.whole[0].shape[3]
    token_ids = subject.tokens(subject.trial.block_size)
    again_kv, again_logits = _prefilled(subject, token_ids, num_logits=2)
    for before, after in ((first_kv, again_kv), (first_logits, again_logits)):
        _require_equal(after, before, "a prompt's output depends on an earlier request")
    return f"{len(token_ids)} tokens unchanged after {num_others} others"


def check_rows(subject: Subject) -> str:
    """A row has the same bits alone, in batches of every kind of size and at every place in them."""
    kv, _ = subject.first
    crowd = [_continued(subject, kv, token_id) for token_id in subject.tokens(subject.max_rows, seed=1)]
    alone = [_decoded(subject, [row]) for row in crowd[:COMPARED_ROWS]]
    sizes = {1, 2, 3, subject.max_rows // 2, subject.max_rows} & set(range(1, subject.max_rows + 1))
    for size in sorted(sizes):
        _require_rows(_decoded(subject, crowd[:size]), alone[:size])
        _require_rows(_decoded(subject, crowd[:size][::-1])[::-1], alone[:size])
    return f"equal in batches of {', '.join(str(size) for size in sorted(sizes))}"


def check_lengths(subject: Subject) -> str:
    """Sequences of unequal lengths in one batch have the bits they have alone."""
    size = subject.trial.block_size
    lengths = [1, 2 * size + size // 2, size, size // 2 + 1][: subject.max_rows]
    crowd = [_continued(subject, _part(subject, place, length), place + 1) for place, length in enumerate(lengths)]
    _require_rows(_decoded(subject, crowd), [_decoded(subject, [row]) for row in crowd])
    return f"equal at lengths {', '.join(str(length) for length in lengths)}"


CHECKS: dict[str, tuple[Callable[[Subject], str], str]] = {
    "causality": (check_causality, "no prefix of it can be reused; serve a model that is causal as configured"),
    "chaining": (check_chaining, "it keeps state outside its KV, so blocks cannot be reused; serve another model"),
    "no history": (check_history, "it keeps state between requests; serve another model"),
    "rows": (check_rows, "lower --max-num-seqs to 1, try another --threads or --dtype, or serve another model"),
    "lengths": (check_lengths, "lower --max-num-seqs to 1, or serve another model"),
}


def _prefilled(subject: Subject, token_ids: list[int], *, num_logits: int = 1) -> Output:
    kv = subject.trial.new_kv(len(token_ids))
    return kv, subject.trial.prefill(kv, token_ids, num_logits=num_logits)


def _part(subject: Subject, start: int, length: int) -> Tensor:
    """KV of ``length`` tokens, or of as many as there are, from a real prompt; of other tokens for other starts."""
    kv, _ = subject.whole
    length = min(length, kv.shape[3])
    return kv.narrow(3, min(start, kv.shape[3] - length), length)


def _continued(subject: Subject, kv: Tensor, token_id: int) -> Row:
    """A sequence that has a copy of ``kv`` and goes on with ``token_id``, within the model's positions."""
    position = min(kv.shape[3], subject.max_positions - 1)
    own = subject.trial.new_kv(position + 1)
    own[:, :, :, :position] = kv[:, :, :, :position]
    return Row(own, token_id, position)


def _decoded(subject: Subject, rows: list[Row]) -> list[Output]:
    """Logits and new KV of each of ``rows`` from one batch."""
    logits = subject.decode(rows)
    return [(logits[place], row.kv[:, :, :, row.position].clone()) for place, row in enumerate(rows)]


def _require_rows(found: list[Output], alone: list[list[Output]]) -> None:
    reason = f"a row's output depends on the others in a batch of {len(found)}"
    for (logits, kv), [(expected_logits, expected_kv)] in zip(found, alone, strict=False):
        _require_equal(logits, expected_logits, reason)
        _require_equal(kv, expected_kv, reason)


def _require_equal(found: Tensor, expected: Tensor, reason: str, *, is_close: bool = False) -> None:
    if torch.equal(found, expected):
        return
    largest = float((found.double() - expected.double()).abs().max())
    if not is_close or not _typical_distance(found, expected) <= TOLERANCES[torch.float32]:
        raise CheckFailed(f"{reason} (largest difference {largest:.2g})")


def _by_token(kv: Tensor) -> Tensor:
    """``[2, num_kv_heads, tokens, head_dim]`` to a row for each token."""
    return kv.movedim(2, 0).flatten(1)


def _typical_distance(mine: Tensor, theirs: Tensor) -> float:
    """A high quantile over tokens: rounding may send single tokens to other experts."""
    return float(torch.quantile(distance(mine, theirs).flatten(), CHAINED_QUANTILE))

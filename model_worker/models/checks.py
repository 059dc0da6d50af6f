"""The five checks of a loaded model: is a prefix's KV its own, whatever follows, came before or runs beside it?

Each takes a ``Subject`` and returns what it measured, or raises ``CheckFailed``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model_worker.models.row_probe import padded_rows
from model_worker.models.trial import TOLERANCES, Row, Trial, distance, walk_tokens

CHAINED_BLOCKS = 3
CHAINED_QUANTILE = 0.75


class CheckFailed(Exception):
    """What was found where a check does not hold."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The model under test and the batches it will be run in.

    ``allowed_rows`` are the batch sizes of the row probe, ``max_rows`` the most sequences
    at once. A model ``has_experts`` whose prefill sends a block's tokens to them together:
    a later token may change the rounding of earlier ones.
    """

    trial: Trial
    allowed_rows: tuple[int, ...]
    max_rows: int
    storage_dtype: torch.dtype
    has_experts: bool

    def tokens(self, num_tokens: int, *, seed: int = 0) -> list[int]:
        """A fixed prompt; other seeds begin otherwise."""
        return walk_tokens(num_tokens, self.trial.vocab_size, start=seed)

    def decode(self, rows: list[Row]) -> Tensor:
        """Decode as the runner does."""
        return self.trial.decode(rows, num_padded=padded_rows(len(rows), self.allowed_rows))


def check_causality(subject: Subject) -> str:
    """A changed last token leaves the KV and logits of all tokens before it as they were."""
    size = subject.trial.block_size
    token_ids = subject.tokens(size)
    changed = [*token_ids[:-1], (token_ids[-1] + 1) % subject.trial.vocab_size]
    kv, logits = _prefilled(subject, token_ids)
    other_kv, other_logits = _prefilled(subject, changed)
    pairs = ((kv[:, :, : size - 1], other_kv[:, :, : size - 1]), (logits[:-1], other_logits[:-1]))
    for before, after in pairs:
        _require_equal(after, before, "a token's output depends on tokens after it", is_close=subject.has_experts)
    return f"{size - 1} tokens unchanged"


def check_chaining(subject: Subject) -> str:
    """Prefill block by block gives what one forward gives, within rounding, in every layer."""
    num_tokens = CHAINED_BLOCKS * subject.trial.block_size
    token_ids = subject.tokens(num_tokens)
    chained = subject.trial.new_kv(num_tokens)
    chained_logits = subject.trial.prefill_blocks(chained, token_ids)
    whole, whole_logits = _prefilled(subject, token_ids)
    by_layer = [
        _typical_distance(one.transpose(0, 1).flatten(1), other.transpose(0, 1).flatten(1))
        for one, other in zip(chained, whole, strict=True)
    ]
    found = max([*by_layer, _typical_distance(chained_logits, whole_logits)])
    tolerance = TOLERANCES[subject.storage_dtype]
    if not found <= tolerance:
        raise CheckFailed(f"block by block differs from one pass by {found:.2g}, more than {tolerance:g}")
    return f"difference {found:.2g} of at most {tolerance:g}"


def check_history(subject: Subject) -> str:
    """A prompt has the same bits again after another, longer one."""
    size = subject.trial.block_size
    first_kv, first_logits = _prefilled(subject, subject.tokens(size))
    _prefilled(subject, subject.tokens(2 * size, seed=1))
    again_kv, again_logits = _prefilled(subject, subject.tokens(size))
    for before, after in ((first_kv, again_kv), (first_logits, again_logits)):
        _require_equal(after, before, "a prompt's output depends on an earlier request")
    return f"{size} tokens unchanged after {2 * size} others"


def check_rows(subject: Subject) -> str:
    """A row has the same bits alone, in batches of every kind of size and at every place in them."""
    crowd = _crowd(subject, [subject.trial.block_size] * subject.max_rows)
    alone = _decoded_alone(subject, crowd)
    for count in sorted({1, 2, 3, subject.max_rows // 2, subject.max_rows} & set(range(1, subject.max_rows + 1))):
        _require_rows(subject, crowd[:count], alone[:count])
        _require_rows(subject, crowd[::-1][:count], alone.flip(0)[:count])
    return f"{subject.max_rows} rows equal at every place"


def check_lengths(subject: Subject) -> str:
    """Sequences of unequal lengths in one batch have the bits they have alone."""
    size = subject.trial.block_size
    lengths = [1, size, 2 * size + size // 2, size // 2 + 1][: max(2, min(4, subject.max_rows))]
    crowd = _crowd(subject, lengths)[: subject.max_rows]
    _require_rows(subject, crowd, _decoded_alone(subject, crowd))
    return f"lengths {', '.join(str(length) for length in lengths[: len(crowd)])}"


CHECKS: dict[str, tuple[Callable[[Subject], str], str]] = {
    "causality": (check_causality, "no prefix of it can be reused; serve a model that is causal as configured"),
    "chaining": (check_chaining, "it keeps state outside its KV, so blocks cannot be reused; serve another model"),
    "no history": (check_history, "it keeps state between requests; serve another model"),
    "rows": (check_rows, "lower --max-num-seqs to 1, try another --threads or --dtype, or serve another model"),
    "lengths": (check_lengths, "lower --max-num-seqs to 1, or serve another model"),
}


def _prefilled(subject: Subject, token_ids: list[int]) -> tuple[Tensor, Tensor]:
    kv = subject.trial.new_kv(len(token_ids))
    return kv, subject.trial.prefill(kv, token_ids)


def _crowd(subject: Subject, lengths: list[int]) -> list[Row]:
    """Sequences with their prompts' KV in place and room for one token more."""
    rows = []
    for seed, length in enumerate(lengths):
        kv = subject.trial.new_kv(length + 1)
        subject.trial.prefill_blocks(kv, subject.tokens(length, seed=seed))
        rows.append(Row(kv, (7 * seed + 1) % subject.trial.vocab_size, length))
    return rows


def _decoded_alone(subject: Subject, crowd: list[Row]) -> Tensor:
    return torch.cat([subject.decode([row]) for row in crowd])


def _require_rows(subject: Subject, crowd: list[Row], expected: Tensor) -> None:
    written = [row.kv[:, :, row.position].clone() for row in crowd]
    found = subject.decode(crowd)
    reason = f"a row's output depends on the others of {len(crowd)}"
    _require_equal(found, expected, reason)
    for row, before in zip(crowd, written, strict=True):
        _require_equal(row.kv[:, :, row.position], before, reason)


def _require_equal(found: Tensor, expected: Tensor, reason: str, *, is_close: bool = False) -> None:
    if torch.equal(found, expected):
        return
    largest = float((found.double() - expected.double()).abs().max())
    if not is_close or not _typical_distance(found, expected) <= TOLERANCES[torch.float32]:
        raise CheckFailed(f"{reason} (largest difference {largest:.2g})")


def _typical_distance(mine: Tensor, theirs: Tensor) -> float:
    """A high quantile over tokens: rounding may send single tokens to other experts."""
    return float(torch.quantile(distance(mine, theirs).flatten(), CHAINED_QUANTILE))

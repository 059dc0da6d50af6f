"""Token ids drawn for prompts: ordinary ones, the same for the same name and seed."""

import hashlib
from array import array
from collections.abc import Collection

SPECIAL_SHARE = 16
"""The first sixteenth of a vocabulary is left out: most models have their special tokens there."""


class TokenSource:
    """Draws runs of token ids that depend on ``seed`` and the run's name alone.

    >>> source = TokenSource(1000, seed=7, excluded=[999])
    >>> source.run("a", 3) == source.run("a", 5)[:3]
    True
    """

    def __init__(self, vocab_size: int, *, seed: int, excluded: Collection[int] = ()) -> None:
        left_out = set(excluded)
        self._ids = [token for token in range(vocab_size // SPECIAL_SHARE, vocab_size) if token not in left_out]
        self._seed = seed

    def run(self, name: str, num_tokens: int) -> tuple[int, ...]:
        """The first ``num_tokens`` ids of the run called ``name``."""
        draws = array("I")
        draws.frombytes(hashlib.shake_128(f"{self._seed}:{name}".encode()).digest(num_tokens * draws.itemsize))
        ids, num_ids = self._ids, len(self._ids)
        return tuple([ids[draw % num_ids] for draw in draws])

"""Token ids drawn for prompts: ordinary ones, the same for the same name and seed."""

import random
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
        self._ids = [token for token in range(vocab_size // SPECIAL_SHARE, vocab_size) if token not in set(excluded)]
        self._seed = seed

    def run(self, name: str, num_tokens: int) -> tuple[int, ...]:
        """The first ``num_tokens`` ids of the run called ``name``."""
        rng = random.Random(f"{self._seed}:{name}")  # noqa: S311  repeatable load, no secret
        return tuple(rng.choices(self._ids, k=num_tokens))

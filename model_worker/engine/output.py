"""The text of one growing output: what may be sent now, and whether a stop text has come.

Text is held back only as long as it could still become a stop text.
"""

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """Turns token ids into text, one at a time, never half a character."""

    def step(self, token_id: int) -> str:
        """The text that became certain with ``token_id``."""


class OutputText:
    """Decodes tokens and watches for stop texts across token boundaries.

    >>> class Letters:
    ...     def step(self, token_id: int) -> str:
    ...         return chr(token_id)
    >>> output = OutputText(Letters(), ["END"])
    >>> "".join(output.push(ord(letter)) for letter in "the ENEND of it")
    'the EN'
    >>> output.matched_stop
    'END'
    """

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = tuple(stops)
        self._held = ""
        self.matched_stop: str | None = None

    def push(self, token_id: int) -> str:
        """Add a token; the text that is certain now. Empty once a stop text was matched. O(held text x stops)."""
        if self.matched_stop is not None:
            return ""
        text = self._held + self._decoder.step(token_id)
        if not self._stops:
            return text
        found = min(((text.find(stop), stop) for stop in self._stops if stop in text), default=None)
        if found is not None:
            place, self.matched_stop = found
            self._held = ""
            return text[:place]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        certain = len(text) - num_held
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back, at an end that is not a stop text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)

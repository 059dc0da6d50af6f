"""The fewest tokens a text can have, known from its bytes where a tokenizer lets that be known.

With such a bound a text far too long for the model's window is refused by its size,
before seconds and a gigabyte are spent on its tokens.
"""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}


@dataclass(frozen=True, slots=True)
class TokenBound:
    """No token stands for more than ``longest`` bytes; bytes of ``dropped`` have no token and vanish."""

    longest: int
    dropped: bytes

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that ``text`` has at least. O(bytes)."""
        num_kept = len(text.encode().translate(None, self.dropped))
        return -(-num_kept // self.longest)


def token_bound(tokenizer: Tokenizer) -> TokenBound | None:
    """The bound of a tokenizer; None where there is none.

    It is known for byte-level BPE (Radford et al., GPT-2, 2019): nothing is normalized, removed or
    made one unknown token, so each byte of a text that has a token is in some token.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    if not _keeps_bytes_apart(tokenizer) or any(token.lstrip or token.rstrip for token in added):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    lengths = [len(token) for token in vocabulary]  # byte-level: one character a byte
    longest = max(lengths + [len(token.content.encode()) for token in added])
    return TokenBound(longest, bytes(byte for byte, letter in byte_letters().items() if letter not in vocabulary))


def byte_letters() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's ``bytes_to_unicode``)."""
    letters = {byte: chr(byte) for byte in _PRINTABLE}
    others = (byte for byte in range(0x100) if byte not in _PRINTABLE)
    return letters | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


def _keeps_bytes_apart(tokenizer: Tokenizer) -> bool:
    model = tokenizer.model
    if not isinstance(model, BPE) or model.unk_token is not None:
        return False
    if tokenizer.normalizer is not None or tokenizer.truncation is not None:
        return False
    steps = _steps(tokenizer.pre_tokenizer)
    return any(step["type"] == "ByteLevel" for step in steps) and not any(map(_may_remove, steps))


def _steps(pre_tokenizer: Any) -> list[dict[str, Any]]:  # noqa: ANN401  the library's classes have no common type
    if pre_tokenizer is None:
        return []
    described = json.loads(pre_tokenizer.__getstate__())
    steps: list[dict[str, Any]] = described["pretokenizers"] if described["type"] == "Sequence" else [described]
    return steps


def _may_remove(step: dict[str, Any]) -> bool:
    if step["type"] == "Split":
        return bool(step["behavior"] == "Removed")
    return step["type"] not in ("ByteLevel", "Digits")

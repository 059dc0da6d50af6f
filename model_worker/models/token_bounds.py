"""How many bytes of text a token can stand for, where a tokenizer lets that be known.

With such a bound a text far too long for the model's window is refused by its size,
before seconds and a gigabyte are spent on its tokens.
"""

import json
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel


def longest_token_bytes(tokenizer: Tokenizer) -> int | None:
    """Most bytes of UTF-8 that one token of any text can stand for; None where there is no such bound.

    It is known for byte-level BPE (Radford et al., GPT-2, 2019) with a token for each byte: nothing
    is normalized, removed, or made one unknown token, so each byte of a text is in some token.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder().values()
    if not _keeps_every_byte(tokenizer, vocabulary) or any(token.lstrip or token.rstrip for token in added):
        return None
    lengths = [len(token) for token in vocabulary]  # byte-level: one character a byte
    return max(lengths + [len(token.content.encode()) for token in added])


def _keeps_every_byte(tokenizer: Tokenizer, vocabulary: dict[str, int]) -> bool:
    if not isinstance(tokenizer.model, BPE) or tokenizer.normalizer is not None or tokenizer.truncation is not None:
        return False
    steps = _steps(tokenizer.pre_tokenizer)
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    return is_byte_level and not any(map(_may_remove, steps)) and vocabulary.keys() >= set(ByteLevel.alphabet())


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

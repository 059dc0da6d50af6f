from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from model_worker.models.token_bounds import longest_token_bytes
from tests.fakes.tiny_model import START, make_tokenizer


def byte_level() -> Tokenizer:
    return make_tokenizer().backend_tokenizer


@cache
def known() -> tuple[Tokenizer, int]:
    tokenizer = byte_level()
    longest = longest_token_bytes(tokenizer)
    assert longest is not None
    return tokenizer, longest


@given(st.text() | st.lists(st.sampled_from([START, " the", "  ", "é", "\0", "👩‍👧"])).map("".join))
def test_no_text_has_fewer_tokens_than_its_bytes_allow(text: str) -> None:
    tokenizer, longest = known()
    assert len(text.encode()) <= longest * len(tokenizer.encode(text).ids)


def test_the_bound_is_the_longest_token() -> None:
    tokenizer, longest = known()
    assert longest == len(START)
    assert len(tokenizer.encode(START).ids) == 1


def test_steps_that_split_and_keep_everything_leave_the_bound() -> None:
    tokenizer = byte_level()
    split = pre_tokenizers.Split(Regex(r"\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    assert longest_token_bytes(tokenizer) == known()[1]


def normalizing() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def removing_spaces() -> Tokenizer:
    tokenizer = byte_level()
    split = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel()])
    return tokenizer


def stripping() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def truncating() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.enable_truncation(5)
    return tokenizer


def without_a_byte() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    return tokenizer


def of_words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(vocab={"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def of_characters() -> Tokenizer:
    return Tokenizer(models.BPE(vocab={"a": 0, "?": 1}, merges=[], unk_token="?", fuse_unk=True))


@pytest.mark.parametrize(
    "make", [normalizing, removing_spaces, stripping, truncating, without_a_byte, of_words, of_characters]
)
def test_there_is_no_bound_where_a_token_may_stand_for_any_length(make: Callable[[], Tokenizer]) -> None:
    assert longest_token_bytes(make()) is None

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from model_worker.models.token_bounds import TokenBound, byte_letters, token_bound
from tests.fakes.tiny_model import START, make_tokenizer


def byte_level() -> Tokenizer:
    return make_tokenizer().backend_tokenizer


@cache
def known() -> tuple[Tokenizer, TokenBound]:
    tokenizer = byte_level()
    bound = token_bound(tokenizer)
    assert bound is not None
    return tokenizer, bound


@cache
def with_few_bytes() -> tuple[Tokenizer, TokenBound]:
    """A tokenizer that knows eight letters, without a token for anything else."""
    letters = "abcdef\u0120\u010a"
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bound = token_bound(tokenizer)
    assert bound is not None
    return tokenizer, bound


@pytest.mark.parametrize("make", [known, with_few_bytes])
@given(text=st.text() | st.text("abcxyz\n ") | st.lists(st.sampled_from([START, " the", "  ", "é", "\0"])).map("".join))
def test_no_text_has_fewer_tokens_than_its_bound(make: Callable[[], tuple[Tokenizer, TokenBound]], text: str) -> None:
    tokenizer, bound = make()
    assert bound.fewest_tokens(text) <= len(tokenizer.encode(text).ids)


def test_a_token_of_the_longest_kind_is_one_at_least() -> None:
    tokenizer, bound = known()
    assert bound.longest == len(START)
    assert bound.fewest_tokens(START * 3) == len(tokenizer.encode(START * 3).ids) == 3
    assert bound.fewest_tokens("") == 0


def test_bytes_without_a_token_do_not_count() -> None:
    tokenizer, bound = with_few_bytes()
    text = "xyz" * 1_000 + "abc"
    assert bound.fewest_tokens(text) == len(tokenizer.encode(text).ids) == 3


def test_every_byte_has_its_letter() -> None:
    assert sorted(byte_letters()) == list(range(256))
    assert set(byte_letters().values()) == set(pre_tokenizers.ByteLevel.alphabet())


def test_steps_that_split_and_keep_everything_leave_the_bound() -> None:
    tokenizer = byte_level()
    split = pre_tokenizers.Split(Regex(r"\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    assert token_bound(tokenizer) == known()[1]


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


def with_an_unknown_token() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "?": 1}, merges=[], unk_token="?", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    return tokenizer


def of_words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(vocab={"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def of_characters() -> Tokenizer:
    return Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))


@pytest.mark.parametrize(
    "make", [normalizing, removing_spaces, stripping, truncating, with_an_unknown_token, of_words, of_characters]
)
def test_there_is_no_bound_where_a_token_may_stand_for_any_length(make: Callable[[], Tokenizer]) -> None:
    assert token_bound(make()) is None

import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from model_worker.models.tokenizer import PromptTokenizer
from prefixcache.errors import InvalidRequest
from tests.fakes.tiny_model import make_tokenizer

REPLACEMENT = "�"
TEXTS = [
    "plain words and the rest",
    "emoji 👩‍👩‍👧‍👦 and 🇨🇭 and 🎉",
    "漢字かな交じり文、한국어",
    "e\u0301 combining, n\u0303, a\u030a\u0323",
    "العربية עברית",
    "\U0001d11e music \u2028 line",
    "",
]


@cache
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer(make_tokenizer())


def stream(token_ids: list[int]) -> list[str]:
    decoder = tokenizer().new_stream()
    return [decoder.step(token_id) for token_id in token_ids]


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_the_text_and_never_half_a_character(text: str) -> None:
    pieces = stream(tokenizer().encode_text(text))
    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces)


@given(st.text())
def test_any_text_comes_back_whole_from_the_stream(text: str) -> None:
    pieces = stream(tokenizer().encode_text(text))
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in piece for piece in pieces)


@given(st.lists(st.integers(0, 263), max_size=40))
def test_any_tokens_stream_as_a_beginning_of_their_text(token_ids: list[int]) -> None:
    whole = tokenizer()._backend.decode(token_ids, skip_special_tokens=True)
    assert whole.startswith("".join(stream(token_ids)))


def test_special_tokens_are_not_in_the_stream_and_are_in_decode() -> None:
    ids = tokenizer().encode_rendered("<|start|>hi<|end|>")
    assert len(ids) == 4
    assert "".join(stream(ids)) == "hi"
    assert tokenizer().decode(ids) == "<|start|>hi<|end|>"


def test_two_streams_do_not_disturb_each_other() -> None:
    ids = tokenizer().encode_text("漢字")
    first, second = tokenizer().new_stream(), tokenizer().new_stream()
    assert first.step(ids[0]) == second.step(ids[0]) == first.step(ids[1]) == ""
    assert "".join(second.step(token_id) for token_id in ids[1:]) == "漢字"


def test_a_conversation_is_rendered_by_the_models_template() -> None:
    text = tokenizer().render_chat([{"role": "user", "content": "hi"}])
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert tokenizer().decode(tokenizer().encode_rendered(text)) == text


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "wizard", "content": "hi"}], "there is no role wizard"),
        ([{"content": "hi"}], "refuses these messages"),
    ],
)
def test_what_the_template_refuses_is_refused_with_its_words(messages: list[dict[str, str]], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        tokenizer().render_chat(messages)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only one system message') }}", "only one system message; send what it accepts"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ messages[7].role }}", "list object has no element 7"),
        ("{{ messages.nobody.role }}", "has no attribute 'nobody'"),
        ("{{ 10 ** 400 * 1.5 }}", "too large"),
        ("{{ none + 1 }}", "unsupported operand"),
        ("{% for message in", "unexpected"),
        ("{{ messages[0].content.__class__.mro() }}", "unsafe"),
    ],
)
def test_whatever_a_template_raises_is_a_refusal(template: str, message: str) -> None:
    broken = make_tokenizer()
    broken.chat_template = template
    with pytest.raises(InvalidRequest, match=message) as refusal:
        PromptTokenizer(broken).render_chat([{"role": "user", "content": "hi"}])
    assert "the model's chat template refuses these messages" in str(refusal.value)


def test_a_model_without_a_template_takes_no_chat() -> None:
    plain = PromptTokenizer(make_tokenizer(has_template=False))
    assert not plain.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        plain.render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("name", ["encode_text", "encode_rendered"])
def test_text_that_is_not_unicode_is_refused(name: str) -> None:
    encode: Any = getattr(tokenizer(), name)
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        encode("a\ud800b")


def test_a_saved_tokenizer_is_the_same(tiny_folder: Path) -> None:
    saved = PromptTokenizer(AutoTokenizer.from_pretrained(tiny_folder))
    for text in TEXTS:
        assert saved.encode_text(text) == tokenizer().encode_text(text)


@pytest.mark.parametrize("name", ["encode_text", "encode_rendered", "decode"])
def test_other_threads_run_while_a_long_text_is_worked_on(name: str) -> None:
    text = "plain words and the rest " * 40_000
    argument = tokenizer().encode_text(text) if name == "decode" else text
    work = getattr(tokenizer(), name)
    started, ended = threading.Event(), threading.Event()

    def run() -> None:
        started.wait()
        work(argument)
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    started.set()
    num_turns = 0
    while not ended.is_set():
        time.sleep(0.001)
        num_turns += 1
    thread.join()
    assert num_turns > 10


TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for message in messages %}{{ message.role }};{% endfor %}"
)


def test_tools_reach_a_template_that_takes_them() -> None:
    taker = make_tokenizer()
    taker.chat_template = TOOLS_TEMPLATE
    prompts = PromptTokenizer(taker)
    assert (prompts.takes_tools, tokenizer().takes_tools) == (True, False)
    messages = [{"role": "user", "content": "x"}, {"role": "tool", "content": "7"}]
    tool: dict[str, object] = {"name": "add", "parameters": {"b": 1, "a": 2}}
    assert prompts.render_chat(messages, [tool]) == '[{"name": "add", "parameters": {"b": 1, "a": 2}}]\nuser;tool;'
    assert prompts.render_chat(messages) == "user;tool;"


def test_a_tool_nested_beyond_reason_is_refused() -> None:
    taker = make_tokenizer()
    taker.chat_template = TOOLS_TEMPLATE
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        PromptTokenizer(taker).render_chat([{"role": "user", "content": "x"}], [deep])

from pathlib import Path

import pytest

from prefixcache.errors import ConfigError
from prefixcache.load.conversation import Answer
from prefixcache.load.prompt_file import each_once, read_prompts
from tests.prompts import DATA


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ('"hello"', "hello"),
        ('{"prompt": "hello", "id": 3}', "hello"),
        ('{"text": "hello"}', "hello"),
        ('{"token_ids": [5, 6]}', (5, 6)),
        ('{"messages": [{"role": "user", "content": "hi"}]}', ({"role": "user", "content": "hi"},)),
        ('{"turns": ["hi", "and?"]}', ({"role": "user", "content": "hi"},)),
    ],
)
def test_every_form_of_a_line_is_read(tmp_path: Path, line: str, prompt: object) -> None:
    (conversation,) = each_once(read_prompts(written(tmp_path, line), max_new_tokens=9))
    request = next(conversation)
    assert (request.prompt, request.max_new_tokens) == (prompt, 9)


def test_turns_are_a_conversation_with_the_real_answers(tmp_path: Path) -> None:
    (conversation,) = each_once(read_prompts(written(tmp_path, '{"turns": ["hi", "and?"]}'), max_new_tokens=9))
    next(conversation)
    answer = Answer((1,), "hello you", prompt_tokens=1, cached_prompt_tokens=None)
    second = conversation.send(answer)
    assert [(turn["role"], turn["content"]) for turn in second.prompt if isinstance(turn, dict)] == [
        ("user", "hi"),
        ("assistant", "hello you"),
        ("user", "and?"),
    ]
    with pytest.raises(StopIteration):
        conversation.send(answer)


def test_a_line_may_have_its_own_length(tmp_path: Path) -> None:
    path = written(tmp_path, '{"text": "hi", "max_new_tokens": 2}')
    assert next(next(each_once(read_prompts(path, max_new_tokens=9)))).max_new_tokens == 2


def test_empty_lines_are_left_out(tmp_path: Path) -> None:
    assert len(read_prompts(written(tmp_path, '"a"', "", '"b"', ""), max_new_tokens=1)) == 2


@pytest.mark.parametrize("name", ["prompts.jsonl", "chats.jsonl"])
def test_the_prompts_of_the_tests_are_such_files(name: str) -> None:
    assert len(read_prompts(DATA / name, max_new_tokens=1)) >= 12


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("3", "line 2 is 3; write a string or an object"),
        ("{}", "line 2 has none of prompt, text, token_ids, messages or turns"),
        ('{"token_ids": []}', "line 2 has none of"),
        ('{"token_ids": ["a"]}', "line 2 has none of"),
        ('{"messages": [{"role": "user"}]}', "line 2 has none of"),
        ('{"text": "a", "max_new_tokens": 0}', "max_new_tokens is 0; give a number from 1 up"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_prompts(written(tmp_path, '"fine"', line), max_new_tokens=1)


def test_an_empty_or_absent_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no line"):
        read_prompts(written(tmp_path), max_new_tokens=1)
    with pytest.raises(ConfigError, match="cannot read the prompts"):
        read_prompts(tmp_path / "absent", max_new_tokens=1)

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefixcache.errors import EngineStopped, InternalError
from prefixcache.load.conversation import Answer, Prompt, Request
from prefixcache.load.plain_target import PlainTarget, plain_target
from tests.cli.conftest import FAKE_WORKER, ROOT


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the process, a fake, writes its id; it runs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(FAKE_WORKER), str(ROOT))))
    monkeypatch.setenv("FAKE_WORKER_RECORD", str(tmp_path / "record.json"))
    return tmp_path / "record.json"


@asynccontextmanager
async def started(*flags: str) -> AsyncIterator[PlainTarget]:
    with tempfile.TemporaryFile() as log:
        async with plain_target(flags, log=log) as target:
            yield target


async def send(target: PlainTarget, prompt: Prompt) -> tuple[Answer, int]:
    arrived: list[int] = []
    answer = await target.send(Request(prompt, 5), arrived.append)
    return answer, sum(arrived)


def is_running(record: Path) -> bool:
    return Path(f"/proc/{json.loads(record.read_text())['pid']}").exists()


@pytest.mark.usefixtures("record")
async def test_requests_at_once_get_their_own_answers() -> None:
    async with started() as target:
        answers = await asyncio.gather(*(send(target, text) for text in ("a", "bb", "ccc")))
    assert [(answer.text, num_tokens) for answer, num_tokens in answers] == [("A", 1), ("BB", 2), ("CCC", 3)]
    assert answers[1][0] == Answer((98, 98), "BB", prompt_tokens=2, cached_prompt_tokens=None)


@pytest.mark.usefixtures("record")
async def test_token_ids_and_messages_are_sent_as_such() -> None:
    async with started() as target:
        for prompt in ((1, 2), ({"role": "user", "content": "hi"},)):
            answer, _ = await send(target, prompt)
            assert answer.text == "TOKENS"


@pytest.mark.usefixtures("record")
async def test_a_failed_request_fails_alone() -> None:
    async with started() as target:
        with pytest.raises(InternalError, match="no such luck"):
            await send(target, "fail")
        assert (await send(target, "a"))[0].text == "A"


@pytest.mark.usefixtures("record")
async def test_a_process_that_ends_fails_what_is_open() -> None:
    async with started() as target:
        hanging = asyncio.create_task(send(target, "hang"))
        await asyncio.sleep(0)
        for waiting in (send(target, "die"), hanging):
            with pytest.raises(EngineStopped, match="has ended"):
                await waiting


@pytest.mark.usefixtures("record")
async def test_a_request_to_an_ended_process_fails() -> None:
    async with started() as target:
        with pytest.raises(EngineStopped):
            await send(target, "die")
        with pytest.raises(EngineStopped):
            await asyncio.wait_for(send(target, "a"), 5)


@pytest.mark.usefixtures("record")
async def test_a_process_that_never_gets_ready_is_an_error_with_its_code() -> None:
    with pytest.raises(EngineStopped, match="ended with code 1 before it was ready"):
        async with started("--model", "broken"):
            pass


async def test_the_process_is_stopped_at_the_end(record: Path) -> None:
    async with started() as target:
        await send(target, "a")
        assert is_running(record)
    assert not is_running(record)


async def test_the_process_is_stopped_where_a_request_is_cancelled(record: Path) -> None:
    async with started() as target:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(send(target, "hang"), 0.05)
    assert not is_running(record)

import json
import signal
from pathlib import Path

import pytest

import prefixcache.cli.demo as demo_verb
from prefixcache import InvalidRequest
from prefixcache.cli.demo_session import DemoScript, load_script
from prefixcache.pb.v1 import admin_pb2
from tests.cli.conftest import Run, Spawn
from tests.fakes.recording_servicer import RecordingServicer, finished_stream

SCRIPT = DemoScript(system="the system text", questions=("What is one?", "What is two?"), chat=("Hi.", "And now?"))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_verb, "load_script", lambda: SCRIPT)


def texts(servicer: RecordingServicer) -> list[list[str]]:
    return [[turn.content for turn in request.prompt.chat.messages] for request in servicer.requests("Generate")]


@pytest.mark.usefixtures("scripted")
def test_the_demo_asks_repeats_and_talks_under_one_system_prompt(
    run: Run, servicer: RecordingServicer, address: str
) -> None:
    assert run("demo", "--address", address).exit_code == 0
    system = SCRIPT.system
    assert texts(servicer) == [
        [system, "What is one?"],
        [system, "What is two?"],
        [system, "What is one?"],
        [system, "Hi."],
        [system, "Hi.", "Hello world", "And now?"],
    ]


@pytest.mark.usefixtures("scripted")
def test_all_requests_share_one_scope_that_no_other_demo_has(
    run: Run, servicer: RecordingServicer, address: str
) -> None:
    for _ in range(2):
        run("demo", "--address", address)
    salts = [request.cache_salt for request in servicer.requests("Generate")]
    assert len(set(salts[:5])) == len(set(salts[5:])) == 1
    assert salts[0] != salts[5]


@pytest.mark.usefixtures("scripted")
def test_the_demo_shows_answers_table_and_totals(run: Run, servicer: RecordingServicer, address: str) -> None:
    servicer.script("Generate", finished_stream("cold", cached_prompt_tokens=0), *[finished_stream("cold")] * 4)
    shown = run("demo", "--address", address).stdout
    assert shown.startswith("tiny on cpu in bfloat16, cache blocks of 4 tokens\n")
    for text in ("ask: What is one?", "again: What is one?", "chat: And now?", "4 of 10 prompt tokens cached"):
        assert text in shown
    assert "hit rate    32.0 % (16 of 50 prompt tokens)" in shown
    assert "time saved  4 s" in shown
    assert "the repeated question got the same tokens as its cold run" in shown


@pytest.mark.usefixtures("scripted")
def test_the_demo_as_json_is_one_object(run: Run, address: str) -> None:
    result = run("demo", "--address", address, "--format", "json", "--max-new-tokens", "7")
    shown = json.loads(result.stdout)
    assert [request["part"] for request in shown["requests"]] == ["question", "question", "repeat", "chat", "chat"]
    assert shown["requests"][0]["answer"]["text"] == "Hello world"
    assert (shown["hit_rate"], shown["is_repeat_equal"], shown["model"]["model"]) == (0.4, True, "tiny")
    assert shown["saved_s"] == pytest.approx(5 * 0.8)


@pytest.mark.usefixtures("scripted")
def test_a_repeat_with_other_tokens_fails(run: Run, servicer: RecordingServicer, address: str) -> None:
    servicer.script("Generate", finished_stream("a"), finished_stream("b"), finished_stream("a", "b"))
    result = run("demo", "--address", address)
    assert result.exit_code == 1
    assert "OTHER TOKENS" in result.stdout
    assert "another answer than the cold run" in result.stderr


@pytest.mark.usefixtures("scripted")
def test_the_chat_waits_until_answers_are_reusable(run: Run, servicer: RecordingServicer, address: str) -> None:
    busy = admin_pb2.GetStatsResponse(engine=admin_pb2.EngineStats(pending_recompute_tokens=9))
    servicer.script("GetStats", busy, busy, admin_pb2.GetStatsResponse())
    assert run("demo", "--address", address).exit_code == 0
    assert len(servicer.requests("GetStats")) == 4


@pytest.mark.usefixtures("scripted")
def test_a_failed_request_ends_the_demo_with_its_error(run: Run, servicer: RecordingServicer, address: str) -> None:
    servicer.script("Generate", [InvalidRequest("too long")])
    result = run("demo", "--address", address)
    assert result.exit_code == 1
    assert result.stderr.endswith("error: too long\n")


def test_the_demo_starts_and_stops_a_worker_of_its_own(spawn: Spawn, record: Path) -> None:
    process = spawn("demo", "--model", "fake")
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "hit rate" in stdout
    assert "\x1b" not in stdout + stderr
    assert stderr.startswith("starting a worker with fake …\n")
    assert "line of the worker's log" not in stderr
    assert not is_running(record)


def test_an_interrupted_demo_stops_its_worker(spawn: Spawn, record: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        process = spawn("demo", "--model", "slow")
        assert process.stdout is not None
        assert process.stdout.readline().startswith("fake on cpu")
        process.send_signal(number)
        assert process.wait(20) == 130
        assert not is_running(record)


def test_a_worker_that_fails_at_start_ends_the_demo_with_its_log(spawn: Spawn) -> None:
    process = spawn("demo", "--model", "broken")
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 3
    assert "there is no model named broken\nerror: the worker ended with code 1" in stderr


def test_the_shipped_script_has_a_long_system_prompt_eight_questions_and_three_turns() -> None:
    script = load_script()
    assert len(script.system.split()) > 500
    assert len(set(script.questions)) == 8
    assert len(script.chat) == 3


def is_running(record: Path) -> bool:
    return Path(f"/proc/{json.loads(record.read_text())['pid']}").exists()

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from prefixcache import (
    CapacityExceeded,
    DeadlineExceeded,
    EngineStopped,
    InternalError,
    InvalidRequest,
    PrefixCacheError,
)
from prefixcache.pb.v1 import worker_pb2
from tests.cli.conftest import Run, Spawn
from tests.fakes.recording_servicer import RecordingServicer, finished_stream


def sent(servicer: RecordingServicer) -> Any:
    return servicer.requests("Generate")[-1]


def turns(servicer: RecordingServicer) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in sent(servicer).prompt.chat.messages]


def test_the_answer_goes_to_stdout_and_one_summary_line_to_stderr(run: Run) -> None:
    result = run("generate", "hi")
    assert (result.exit_code, result.stdout) == (0, "Hello world\n")
    assert result.stderr == ("10 prompt tokens, 4 cached · 2 new · TTFT 500 ms · TPOT 600 ms · saved 800 ms\n")


def test_json_is_one_object_with_everything(run: Run) -> None:
    result = run("generate", "hi", "--format", "json", "--request-id", "mine")
    answer = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("Hello world", [1, 2], "eos")
    assert (answer["usage"]["cached_prompt_tokens"], answer["timings"]["ttft_s"]) == (4, 0.5)
    assert (answer["request_id"], result.stderr) == ("mine", "")


def test_the_text_becomes_a_user_message(run: Run, servicer: RecordingServicer) -> None:
    run("generate", "hi")
    assert turns(servicer) == [("user", "hi")]


def test_a_system_message_comes_first(run: Run, servicer: RecordingServicer) -> None:
    run("generate", "hi", "--system", "be short")
    assert turns(servicer) == [("system", "be short"), ("user", "hi")]


def test_a_system_message_can_come_from_a_file(run: Run, servicer: RecordingServicer, tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("from a file: ä", encoding="utf-8")
    run("generate", "hi", "--system", f"@{tmp_path / 'system.txt'}")
    assert turns(servicer)[0] == ("system", "from a file: ä")


def test_raw_sends_plain_text(run: Run, servicer: RecordingServicer) -> None:
    run("generate", "hi", "--raw")
    assert sent(servicer).prompt.text == "hi"


def test_a_model_without_template_gets_plain_text(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("GetModelInfo", worker_pb2.GetModelInfoResponse())
    run("generate", "hi")
    assert sent(servicer).prompt.text == "hi"


def test_a_dash_reads_stdin(run: Run, servicer: RecordingServicer) -> None:
    run("generate", "-", "--raw", stdin="from\nstdin\n")
    assert sent(servicer).prompt.text == "from\nstdin\n"


def test_every_option_is_sent(run: Run, servicer: RecordingServicer) -> None:
    options = "--max-new-tokens 5 --temperature 0.5 --top-k 3 --top-p 0.25 --seed 7 --stop A --stop B"
    more = "--stop-token-id 8 --ignore-eos --cache-salt s --model m --timeout 9 --min-new-tokens 2 --min-p 0.125"
    logits = (
        "--priority -3 "
        "--repetition-penalty 1.5 --presence-penalty 0.5 --frequency-penalty -1 --logit-bias 4=2.5 --logit-bias 5=-9"
    )
    assert run("generate", "hi", *options.split(), *more.split(), *logits.split()).exit_code == 0
    request = sent(servicer)
    sampling, stopping = request.sampling, request.stopping
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 3, 0.25, 7)
    assert (stopping.max_new_tokens, stopping.stop, stopping.stop_token_ids) == (5, ["A", "B"], [8])
    assert (stopping.ignore_eos, request.cache_salt, request.model) == (True, "s", "m")
    assert (sampling.min_p, sampling.repetition_penalty, stopping.min_new_tokens) == (0.125, 1.5, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1)
    assert not request.bypass_prefix_cache
    assert request.priority == -3
    assert dict(sampling.logit_bias) == {4: 2.5, 5: -9}
    left_s = servicer.calls[-1].timeout_s
    assert left_s is not None
    assert 5 < left_s < 10


def test_bypassing_and_progress_are_asked_for(run: Run, servicer: RecordingServicer) -> None:
    told = worker_pb2.Progress(processed_prompt_tokens=4, prompt_tokens=10)
    started, *rest = finished_stream("Hello")
    servicer.script("Generate", [started, worker_pb2.GenerateResponse(progress=told), *rest])
    result = run("generate", "hi", "--bypass-prefix-cache", "--progress")
    assert (sent(servicer).bypass_prefix_cache, sent(servicer).report_progress) == (True, True)
    assert result.stderr.startswith("4 of 10 prompt tokens computed\n")
    assert result.stdout == "Hello\n"


def test_logprobs_are_in_the_json(run: Run, servicer: RecordingServicer) -> None:
    messages = finished_stream("Hello")
    messages[1].tokens.logprobs.add(logprob=-0.5, top=[worker_pb2.TopLogprob(id=1, logprob=-0.5)])
    servicer.script("Generate", messages)
    answer = json.loads(run("generate", "hi", "--logprobs", "1", "--format", "json").stdout)
    assert answer["logprobs"] == [{"logprob": -0.5, "top": [[1, -0.5]]}]
    assert sent(servicer).sampling.logprobs == 1


@pytest.mark.parametrize(("verb", "method"), [("generate", "Generate"), ("lookup", "Lookup"), ("warm", "Warm")])
def test_tools_come_from_a_file(run: Run, servicer: RecordingServicer, tmp_path: Path, verb: str, method: str) -> None:
    (tmp_path / "tools.json").write_text('[{"name": "add"}, {}]', encoding="utf-8")
    assert run(verb, "hi", "--tools", str(tmp_path / "tools.json")).exit_code == 0
    assert list(servicer.requests(method)[0].prompt.chat.tools) == ['{"name": "add"}', "{}"]


@pytest.mark.parametrize("text", ["{}", "[1]", "nonsense"])
def test_a_file_without_tools_is_wrong_usage(run: Run, servicer: RecordingServicer, tmp_path: Path, text: str) -> None:
    (tmp_path / "tools.json").write_text(text, encoding="utf-8")
    assert run("generate", "hi", "--tools", str(tmp_path / "tools.json")).exit_code == 2
    assert servicer.requests("Generate") == []


def test_stdin_that_is_no_text_is_wrong_usage(spawn: Spawn, tmp_path: Path, address: str) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with (tmp_path / "bytes").open() as stdin:
        process = spawn("generate", "-", "--address", address, stdin=stdin)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "stdin is not UTF-8 text" in " ".join(stderr.split())


def test_a_reader_that_leaves_is_no_traceback(spawn: Spawn, servicer: RecordingServicer, address: str) -> None:
    servicer.script("Generate", finished_stream(*["word "] * 20_000))
    process = spawn("generate", "hi", "--address", address)
    assert process.stdout is not None
    assert process.stdout.read(4) == "word"
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(20) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("the reason"), 1),
        (InternalError("the reason"), 1),
        (EngineStopped("the reason"), 3),
        (DeadlineExceeded("the reason"), 4),
    ],
)
def test_an_error_is_one_line_on_stderr_and_an_exit_code(
    run: Run, servicer: RecordingServicer, error: PrefixCacheError, code: int
) -> None:
    servicer.script("Generate", [error])
    result = run("generate", "hi")
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_a_full_worker_is_told_with_when_to_try_again(run: Run, servicer: RecordingServicer) -> None:
    message = "the queue is full: 3 requests wait; try again in about 2.5 s or raise --max-waiting"
    servicer.script("Generate", [CapacityExceeded(message, retry_after_s=2.5)])
    result = run("generate", "hi")
    assert (result.exit_code, result.stderr) == (1, f"error: {message}\n")


def test_an_absent_worker_is_exit_code_3(run: Run) -> None:
    result = run("generate", "hi", to="127.0.0.1:1")
    assert result.exit_code == 3
    assert "prefixcache serve" in result.stderr


def test_a_passed_deadline_is_exit_code_4(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("Generate", [5.0])
    assert run("generate", "hi", "--timeout", "0.2").exit_code == 4


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["hi", "--temperature", "-1"],
        ["hi", "--max-new-tokens", "0"],
        ["hi", "--top-p", "2"],
        ["hi", "--min-p", "2"],
        ["hi", "--logprobs", "1"],
        ["hi", "--logprobs", "21", "--format", "json"],
        ["hi", "-n", "0"],
        ["hi", "-n", "65"],
        ["hi", "--logit-bias", "4"],
        ["hi", "--logit-bias", "x=1"],
        ["hi", "--format", "xml"],
        ["hi", "--raw", "--system", "s"],
        ["hi", "--system", "@/no/such/file"],
        ["hi", "--unknown"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2_and_sends_nothing(
    run: Run, servicer: RecordingServicer, arguments: list[str]
) -> None:
    assert run("generate", *arguments).exit_code == 2
    assert servicer.requests("Generate") == []


def test_ctrl_c_stops_the_request_with_exit_code_130(spawn: Spawn, servicer: RecordingServicer, address: str) -> None:
    servicer.script("Generate", [*finished_stream("Hello")[:2], 30.0])
    process = spawn("generate", "hi", "--address", address)
    assert process.stdout is not None
    assert process.stdout.read(5) == "Hello"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert (process.returncode, stderr) == (130, "interrupted\n")


def test_an_answer_that_cannot_be_written_is_one_line(spawn: Spawn, address: str) -> None:
    with Path("/dev/full").open("w") as full:
        process = spawn("generate", "hi", "--address", address, stdout=full)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (1, "error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(
    ("descriptor", "text", "code", "said"), [(0, "-", 2, "stdin is closed"), (1, "hi", 0, "10 prompt tokens")]
)
def test_a_stream_that_the_parent_closed_is_no_fault(
    spawn: Spawn, address: str, descriptor: int, text: str, code: int, said: str
) -> None:
    process = spawn("generate", text, "--address", address, closed=descriptor)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert said in err
    assert "Traceback" not in err


def test_several_answers_are_printed_whole_under_their_numbers(run: Run, servicer: RecordingServicer) -> None:
    messages = finished_stream("a", "b", "c", "d")
    for message, number in zip(messages[1:5], [0, 1, 0, 1], strict=True):
        message.tokens.sample = number
    servicer.script("Generate", messages)
    result = run("generate", "hi", "-n", "2")
    assert result.stdout == "[0]\nac\n[1]\nbd\n"
    assert "4 new" in result.stderr
    assert sent(servicer).sampling.n == 2

import json
import os
import pty
import select
import signal
import subprocess
import time
from typing import Any

from prefixcache import InvalidRequest
from prefixcache.pb.v1 import worker_pb2
from tests.cli.conftest import Run, Spawn
from tests.fakes.recording_servicer import RecordingServicer, finished_stream

PATIENCE_S = 20.0


def conversations(servicer: RecordingServicer) -> list[list[tuple[str, str]]]:
    return [
        [(turn.role, turn.content) for turn in request.prompt.chat.messages]
        for request in servicer.requests("Generate")
    ]


def test_each_line_of_stdin_is_a_turn_and_answers_are_remembered(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("Generate", finished_stream("one"), finished_stream("two"))
    result = run("chat", "--system", "s", stdin="first\n\nsecond\n")
    assert (result.exit_code, result.stdout) == (0, "one\ntwo\n")
    first, second = conversations(servicer)
    assert first == [("system", "s"), ("user", "first")]
    assert second == [*first, ("assistant", "one"), ("user", "second")]


def test_every_turn_shows_its_cached_tokens(run: Run) -> None:
    result = run("chat", stdin="a\nb\n")
    assert result.stderr.count("10 prompt tokens, 4 cached") == 2


def test_reset_starts_over_but_keeps_the_system_message(run: Run, servicer: RecordingServicer) -> None:
    run("chat", "--system", "s", stdin="a\n/reset\nb\n")
    assert conversations(servicer)[1] == [("system", "s"), ("user", "b")]


def test_every_turn_is_drawn_as_asked(run: Run, servicer: RecordingServicer) -> None:
    run("chat", "--temperature=0.5", "--top-k=3", "--top-p=0.25", "--seed=7", stdin="a\nb\n")
    for request in servicer.requests("Generate"):
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 3, 0.25, 7)


def test_quit_leaves_before_the_rest(run: Run, servicer: RecordingServicer) -> None:
    assert run("chat", stdin="a\n/quit\nb\n").exit_code == 0
    assert len(conversations(servicer)) == 1


def test_json_is_one_object_a_turn(run: Run) -> None:
    lines = run("chat", "--format", "json", stdin="a\nb\n").stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["Hello world"] * 2


def test_a_model_without_template_is_refused(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("GetModelInfo", worker_pb2.GetModelInfoResponse())
    result = run("chat", stdin="a\n")
    assert result.exit_code == 1
    assert "no chat template" in result.stderr


def test_a_failed_turn_ends_a_scripted_chat(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("Generate", [InvalidRequest("too long")])
    assert run("chat", stdin="a\nb\n").exit_code == 1
    assert len(conversations(servicer)) == 1


class Terminal:
    """A chat under a pseudo-terminal."""

    def __init__(self, spawn: Spawn, address: str, *flags: str) -> None:
        self._ours, theirs = pty.openpty()
        ends: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        self.process: subprocess.Popen[str] = spawn(
            "chat", "--address", address, *flags, **ends, start_new_session=True
        )
        os.close(theirs)
        self.shown = ""

    def await_text(self, text: str) -> None:
        assert self.is_shown(text, within_s=PATIENCE_S), self.shown
        self.shown = self.shown.partition(text)[2]

    def is_shown(self, text: str, *, within_s: float) -> bool:
        end = time.monotonic() + within_s
        while text not in self.shown:
            if not select.select([self._ours], [], [], max(0.0, end - time.monotonic()))[0]:
                return False
            self.shown += os.read(self._ours, 1000).decode()
        return True

    def interrupt_until(self, text: str) -> None:
        """Send SIGINT until ``text`` is shown: one that comes just before readline waits is noticed only later."""
        for _ in range(int(PATIENCE_S)):
            self.process.send_signal(signal.SIGINT)
            if self.is_shown(text, within_s=1.0):
                break
        self.await_text(text)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def leave(self) -> int:
        code = self.process.wait(PATIENCE_S)
        os.close(self._ours)
        return code


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(spawn: Spawn, servicer: RecordingServicer, address: str) -> None:
    servicer.script("Generate", [*finished_stream("partial")[:2], 30.0], finished_stream("whole"))
    terminal = Terminal(spawn, address)
    terminal.await_text("> ")
    terminal.type("first\n")
    terminal.await_text("partial")
    terminal.process.send_signal(signal.SIGINT)
    terminal.await_text("(stopped)")
    terminal.await_text("> ")
    terminal.type("second\n")
    terminal.await_text("whole")
    terminal.await_text("> ")
    terminal.type("\x04")
    assert terminal.leave() == 0
    assert conversations(servicer)[1] == [("user", "first"), ("assistant", "partial"), ("user", "second")]


def test_ctrl_c_stops_an_answer_in_json_and_forgets_its_turn(
    spawn: Spawn, servicer: RecordingServicer, address: str
) -> None:
    servicer.script("Generate", [*finished_stream("partial")[:2], 30.0], finished_stream("whole"))
    terminal = Terminal(spawn, address, "--format", "json")
    terminal.await_text("> ")
    terminal.type("first\n")
    wait_for_call(servicer)
    terminal.interrupt_until("(stopped; this turn is forgotten)")
    terminal.await_text("> ")
    terminal.type("second\n")
    terminal.await_text('"text": "whole"')
    terminal.await_text("> ")
    terminal.type("/quit\n")
    assert terminal.leave() == 0
    assert conversations(servicer)[1] == [("user", "second")]


def wait_for_call(servicer: RecordingServicer) -> None:
    end = time.monotonic() + PATIENCE_S
    while not servicer.requests("Generate"):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_closed_stdin_is_a_usage_error(spawn: Spawn, address: str) -> None:
    process = spawn("chat", "--address", address, closed=0)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert "stdin is closed; chat reads from it what you say" in err
    assert "Traceback" not in err


def test_ctrl_c_at_the_prompt_says_how_to_leave(spawn: Spawn, address: str) -> None:
    terminal = Terminal(spawn, address)
    terminal.await_text("> ")
    terminal.interrupt_until("/quit or Ctrl-D leaves")
    terminal.await_text("> ")
    terminal.type("/quit\n")
    assert terminal.leave() == 0


def test_a_failed_turn_is_shown_and_forgotten_on_a_terminal(
    spawn: Spawn, servicer: RecordingServicer, address: str
) -> None:
    servicer.script("Generate", [InvalidRequest("too long")], finished_stream("fine"))
    terminal = Terminal(spawn, address)
    terminal.await_text("> ")
    terminal.type("first\n")
    terminal.await_text("error: too long")
    terminal.await_text("> ")
    terminal.type("second\n")
    terminal.await_text("fine")
    terminal.type("/quit\n")
    assert terminal.leave() == 0
    assert conversations(servicer)[1] == [("user", "second")]

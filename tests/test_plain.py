import io
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from model_worker.models.plain import Job
from model_worker.models.tokenizer import PromptTokenizer
from model_worker.plain import EventLines, answer_lines
from tests.fakes.tiny_model import make_tokenizer


class Submitted:
    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def close(self) -> None:
        raise AssertionError("whoever made it closes it")


@pytest.fixture
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer(make_tokenizer())


def answered(tokenizer: PromptTokenizer, *requests: dict[str, Any]) -> tuple[list[Job], list[dict[str, Any]]]:
    generation, output = Submitted(), io.StringIO()
    lines = [json.dumps({"id": number, "max_new_tokens": 3} | request) for number, request in enumerate(requests)]
    answer_lines(lines, generation, tokenizer, EventLines(output, tokenizer))
    return generation.jobs, [json.loads(line) for line in output.getvalue().splitlines()]


def test_every_form_of_prompt_becomes_the_tokens_a_worker_computes(tokenizer: PromptTokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    jobs, _ = answered(tokenizer, {"token_ids": [4, 5]}, {"text": "the and"}, {"messages": messages})
    rendered = tokenizer.encode_rendered(tokenizer.render_chat(messages))
    assert [job.token_ids for job in jobs] == [[4, 5], tokenizer.encode_text("the and"), rendered]
    assert [(job.number, job.max_new_tokens) for job in jobs] == [(0, 3), (1, 3), (2, 3)]


def test_a_prompt_that_the_template_refuses_fails_alone(tokenizer: PromptTokenizer) -> None:
    jobs, events = answered(tokenizer, {"messages": [{"role": "judge", "content": "hi"}]}, {"text": "fine"})
    assert [job.number for job in jobs] == [1]
    assert (events[0]["event"], events[0]["id"]) == ("failed", 0)
    assert "there is no role judge" in events[0]["message"]


@pytest.mark.parametrize("mode", ["sequential", "continuous"])
def test_the_process_answers_lines_and_ends_with_them(tiny_folder: Path, mode: str) -> None:
    flags = ("--model", str(tiny_folder), "--mode", mode, "--dtype", "float32", "--device", "cpu", "--threads", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "model_worker.plain", *flags, "--ignore-eos", "--kv-tokens", "1024"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        events = (json.loads(line) for line in process.stdout)
        assert next(events)["event"] == "ready"
        process.stdin.write('{"id": 7, "text": "the and", "max_new_tokens": 3}\n')
        process.stdin.flush()
        *tokens, finished = islice(events, 4)
        process.stdin.close()
        assert process.wait(20) == 0
    assert tokens == [{"event": "tokens", "id": 7, "num_tokens": 1}] * 3
    assert (finished["event"], finished["id"], finished["prompt_tokens"]) == ("finished", 7, 3)
    assert len(finished["token_ids"]) == 3


def test_an_unknown_model_ends_the_process_with_a_message() -> None:
    command = [sys.executable, "-m", "model_worker.plain", "--model", "absent"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no model 'absent'" in done.stderr

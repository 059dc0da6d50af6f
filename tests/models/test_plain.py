import json
import shutil
import threading
from pathlib import Path

import pytest
import torch

from model_worker.models.plain import (
    ContinuousGeneration,
    Job,
    PlainModel,
    SequentialGeneration,
    load_plain,
)
from prefixcache.errors import ConfigError

MODES = ("sequential", "continuous")
PROMPTS = [[20, 30, 40, 50], list(range(10, 80)), [*range(10, 80), 5]]


class Collected:
    """A listener that waits for answers."""

    def __init__(self, number: int) -> None:
        self.answers: dict[int, list[int]] = {}
        self.failures: dict[int, str] = {}
        self.num_reported: dict[int, int] = {}
        self._open = threading.Semaphore(0)
        self._number = number

    def on_tokens(self, job: Job, num_tokens: int) -> None:
        self.num_reported[job.number] = self.num_reported.get(job.number, 0) + num_tokens

    def on_finished(self, job: Job, token_ids: list[int]) -> None:
        self.answers[job.number] = token_ids
        self._open.release()

    def on_failed(self, job: Job, message: str) -> None:
        self.failures[job.number] = message
        self._open.release()

    def wait(self) -> None:
        for _ in range(self._number):
            assert self._open.acquire(timeout=60)


@pytest.fixture
def plain(tiny_folder: Path) -> PlainModel:
    return load(tiny_folder)


def load(folder: Path, *, ignore_eos: bool = True) -> PlainModel:
    return load_plain(str(folder), dtype="float32", device="cpu", ignore_eos=ignore_eos)


def answers(mode: str, plain: PlainModel, *jobs: Job) -> Collected:
    listener = Collected(len(jobs))
    generation = (
        SequentialGeneration(plain, listener)
        if mode == "sequential"
        else ContinuousGeneration(plain, listener, kv_tokens=2_048)
    )
    try:
        for job in jobs:
            generation.submit(job)
        listener.wait()
    finally:
        generation.close()
    return listener


def folder_with_eos(source: Path, target: Path, token_id: int) -> Path:
    shutil.copytree(source, target)
    path = target / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": token_id}))
    return target


@torch.inference_mode()
def expected(plain: PlainModel, prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(plain.causal(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_the_model_s_greedy_tokens_and_all_are_reported(plain: PlainModel, mode: str) -> None:
    wanted = {number: expected(plain, prompt, 6 + number) for number, prompt in enumerate(PROMPTS)}
    jobs = [Job(number, prompt, 6 + number) for number, prompt in enumerate(PROMPTS)]
    found = answers(mode, plain, *jobs)
    assert found.answers == wanted
    assert found.num_reported == {0: 6, 1: 7, 2: 8}


@pytest.mark.parametrize("mode", MODES)
def test_end_tokens_are_ignored_where_asked_for(tiny_folder: Path, tmp_path: Path, mode: str) -> None:
    tokens = expected(load(tiny_folder), PROMPTS[0], 12)
    place = next(place for place in range(1, 12) if tokens[place] not in tokens[:place])
    ending = folder_with_eos(tiny_folder, tmp_path / "ending", tokens[place])
    lengths = [
        len(answers(mode, load(ending, ignore_eos=ignore_eos), Job(0, PROMPTS[0], 12)).answers[0])
        for ignore_eos in (True, False)
    ]
    assert lengths == [12, place + 1]


def test_a_job_that_cannot_run_fails_alone(plain: PlainModel) -> None:
    found = answers("sequential", plain, Job(0, [10**6], 2), Job(1, [5, 6], 2))
    assert list(found.failures) == [0]
    assert len(found.answers[1]) == 2


def test_jobs_that_are_open_at_the_end_fail(plain: PlainModel) -> None:
    listener = Collected(1)
    generation = ContinuousGeneration(plain, listener, kv_tokens=2_048)
    generation.submit(Job(0, PROMPTS[0], 400))
    generation.close()
    listener.wait()
    assert list(listener.failures) == [0]


def test_a_model_that_cannot_be_loaded_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"cannot load the model in {tmp_path}"):
        load(tmp_path)

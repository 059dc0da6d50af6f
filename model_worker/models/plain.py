"""Plain transformers beside the worker: the same weights, its own attention and cache, for comparison alone.

``SequentialGeneration`` is ``generate``, one request after another; ``ContinuousGeneration``
its continuous batching with block sharing. Both are greedy and report tokens as they come.
"""

import queue
import threading
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.streamers import BaseStreamer

from model_worker.models.catalog import resolve
from model_worker.models.loading import DTYPES, model_folder, pick_device
from model_worker.models.tokenizer import PromptTokenizer
from model_worker.models.transformers_adapter import silence
from prefixcache.errors import ConfigError

NO_EOS: Final = -1
POLL_S: Final = 1.0
WARM_UP_TOKENS: Final = 4


@dataclass(frozen=True, slots=True)
class PlainModel:
    """A model, its tokenizer and, unless ended by length alone, its end tokens."""

    causal: PreTrainedModel
    tokenizer: PromptTokenizer
    eos_token_ids: list[int]


@dataclass(slots=True)
class Job:
    """One request: a number of the caller's, the prompt's tokens, how many to generate at most."""

    number: int
    token_ids: list[int]
    max_new_tokens: int
    num_reported: int = field(default=0, init=False)


class Listener(Protocol):
    """Hears of jobs; called on the generating thread."""

    def on_tokens(self, job: Job, num_tokens: int) -> None:
        """So many more tokens were generated."""
        ...

    def on_finished(self, job: Job, token_ids: list[int]) -> None:
        """The answer is whole."""
        ...

    def on_failed(self, job: Job, message: str) -> None:
        """There will be no answer."""
        ...


def load_plain(model: str, *, dtype: str, device: str, ignore_eos: bool, num_threads: int | None = None) -> PlainModel:
    """Load ``model`` as a worker would, into transformers' own class. Raises ConfigError or NotFound."""
    silence()
    torch.set_num_threads(num_threads or torch.get_num_threads())
    source = resolve(model)
    folder = model_folder(source, dtype)
    try:
        causal: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot load the model in {folder} with plain transformers: {error}") from error
    eos = causal.generation_config.eos_token_id
    eos_token_ids = [] if ignore_eos or eos is None else list(eos) if isinstance(eos, list) else [int(eos)]
    # generate() fills what a request leaves out from the model's own settings.
    causal.generation_config = GenerationConfig(do_sample=False, eos_token_id=eos_token_ids or None, pad_token_id=0)
    return PlainModel(causal.to(pick_device(device)).eval(), PromptTokenizer(tokenizer), eos_token_ids)


def _warm_up_job() -> Job:
    return Job(0, [1, 2, 3, 4], WARM_UP_TOKENS)


class SequentialGeneration:
    """``generate`` on a thread of its own, one job after another in the order of ``submit``."""

    def __init__(self, model: PlainModel, listener: Listener) -> None:
        self._causal: Any = model.causal  # its generate has no type
        self._listener = listener
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._is_warm = threading.Event()
        thread = threading.Thread(target=self._run, name="plain-sequential", daemon=True)
        thread.start()
        while not self._is_warm.wait(POLL_S):
            if not thread.is_alive():
                raise ConfigError("generate of transformers does not run with this model; the traceback says why")

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def close(self) -> None:
        """Take no more jobs and end the thread after those it has."""
        self._jobs.put(None)

    def _run(self) -> None:
        self._generate(_warm_up_job(), None)
        self._is_warm.set()
        while (job := self._jobs.get()) is not None:
            try:
                self._listener.on_finished(job, self._generate(job, _Progress(job, self._listener)))
            except Exception as error:  # noqa: BLE001  whatever the library raises ends this job, not the run
                self._listener.on_failed(job, repr(error))

    @torch.inference_mode()
    def _generate(self, job: Job, streamer: "_Progress | None") -> list[int]:
        ids = torch.tensor([job.token_ids], device=self._causal.device)
        output = self._causal.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=job.max_new_tokens, streamer=streamer
        )
        return [int(token) for token in output[0, len(job.token_ids) :]]


class _Progress(BaseStreamer):
    """What ``generate`` reports to: the prompt first, then each token."""

    def __init__(self, job: Job, listener: Listener) -> None:
        self._job = job
        self._listener = listener
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        """Take the prompt or new tokens."""
        if self._has_prompt:
            self._listener.on_tokens(self._job, value.numel())
        self._has_prompt = True

    def end(self) -> None:
        """Nothing is left to do at the end."""


class ContinuousGeneration:
    """transformers' continuous batching with room for ``kv_tokens`` tokens, whose full blocks are shared.

    ``max_batch_tokens`` None leaves the tokens of a step to the library.
    """

    def __init__(
        self, model: PlainModel, listener: Listener, *, kv_tokens: int, max_batch_tokens: int | None = None
    ) -> None:
        config = ContinuousBatchingConfig(allow_block_sharing=True, max_batch_tokens=max_batch_tokens)
        page_size: int = getattr(config, "page_size", None) or config.block_size or 1  # its name up to 5.16
        config.num_blocks = -(-kv_tokens // page_size)
        self._listener = listener
        self._eos: Any = model.eos_token_ids or NO_EOS
        self._jobs: dict[str, Job] = {}
        causal: Any = model.causal  # the mixin's methods have no types
        self._manager = causal.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=self._eos),
            continuous_batching_config=config,
        )
        with torch.inference_mode():
            self._manager.start()
        self._add("warm-up", _warm_up_job())
        while (result := self._manager.get_result(timeout=POLL_S)) is None or not result.is_finished():
            if not self._manager.is_running():
                raise ConfigError(
                    "continuous batching of transformers does not start with this model; its log says why"
                )
        threading.Thread(target=self._run, name="plain-continuous", daemon=True).start()

    def submit(self, job: Job) -> None:
        """Let a job join the batch."""
        self._jobs[str(job.number)] = job
        self._add(str(job.number), job)

    def close(self) -> None:
        """End the library's thread now; jobs that are open fail."""
        self._manager.stop(block=True, hard_stop=True)

    def _add(self, name: str, job: Job) -> None:
        self._manager.add_request(
            job.token_ids, request_id=name, max_new_tokens=job.max_new_tokens, streaming=True, eos_token_id=self._eos
        )

    def _run(self) -> None:
        while self._manager.is_running():
            result = self._manager.get_result(timeout=POLL_S)
            if result is not None:
                self._take(result)
        for job in self._jobs.values():
            self._listener.on_failed(job, "continuous batching ended")

    def _take(self, result: Any) -> None:  # noqa: ANN401  a GenerationOutput of the library
        job = self._jobs[result.request_id]
        if result.error is not None:
            del self._jobs[result.request_id]
            self._listener.on_failed(job, str(result.error))
            return
        num_new = len(result.generated_tokens) - job.num_reported
        if num_new > 0:
            job.num_reported += num_new
            self._listener.on_tokens(job, num_new)
        if result.is_finished():
            del self._jobs[result.request_id]
            self._listener.on_finished(job, list(result.generated_tokens))

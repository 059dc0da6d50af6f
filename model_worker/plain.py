"""``python -m model_worker.plain``: plain transformers as a process, for ``prefixcache bench --compare``.

Reads one request a line on stdin, ``{"id", "token_ids" | "text" | "messages",
"max_new_tokens"}``, and writes one event a line on stdout: ``ready`` once, then for each
request any number of ``tokens`` and one ``finished`` or ``failed``. Ends with stdin. It
has no cache of this project and no server.
"""

import argparse
import json
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol

from prefixcache.errors import ConfigError, InvalidRequest, NotFound, PrefixCacheError

if TYPE_CHECKING:
    from model_worker.models.plain import Job, PlainModel
    from model_worker.models.tokenizer import PromptTokenizer


class Generation(Protocol):
    """Something that answers jobs and tells a listener."""

    def submit(self, job: "Job") -> None:
        """Take a job."""
        ...

    def close(self) -> None:
        """Take no more jobs."""
        ...


class EventLines:
    """Writes what happens to jobs as lines of JSON; for any thread."""

    def __init__(self, output: IO[str], tokenizer: "PromptTokenizer") -> None:
        self._output = output
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def write(self, event: str, **fields: object) -> None:
        """Write one event."""
        with self._lock:
            print(json.dumps({"event": event, **fields}), file=self._output, flush=True)

    def on_tokens(self, job: "Job", num_tokens: int) -> None:
        """Tell of new tokens."""
        self.write("tokens", id=job.number, num_tokens=num_tokens)

    def on_finished(self, job: "Job", token_ids: list[int]) -> None:
        """Tell of a whole answer."""
        text = self._tokenizer.decode(token_ids)
        self.write("finished", id=job.number, token_ids=token_ids, text=text, prompt_tokens=len(job.token_ids))

    def on_failed(self, job: "Job", message: str) -> None:
        """Tell of a failure."""
        self.write("failed", id=job.number, message=message)


def answer_lines(
    lines: Iterable[str], generation: Generation, tokenizer: "PromptTokenizer", events: EventLines
) -> None:
    """Submit each line's request; one that cannot be read fails alone."""
    from model_worker.models.plain import Job

    for line in lines:
        fields = json.loads(line)
        try:
            token_ids = _token_ids(fields, tokenizer)
        except InvalidRequest as error:
            events.write("failed", id=fields["id"], message=str(error))
        else:
            generation.submit(Job(fields["id"], token_ids, fields["max_new_tokens"]))


def _token_ids(fields: dict[str, Any], tokenizer: "PromptTokenizer") -> list[int]:
    if "token_ids" in fields:
        return list(fields["token_ids"])
    if "messages" in fields:
        return tokenizer.encode_rendered(tokenizer.render_chat(fields["messages"]))
    return tokenizer.encode_text(fields["text"])


def parser() -> argparse.ArgumentParser:
    """The flags of the process."""
    flags = argparse.ArgumentParser(prog="python -m model_worker.plain", description=__doc__)
    flags.add_argument("--model", default="smollm2-135m", help="a catalogue name, a folder or a .gguf file")
    flags.add_argument("--mode", choices=("sequential", "continuous"), default="sequential")
    flags.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    flags.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    flags.add_argument("--threads", type=int, help="CPU threads; all by default")
    flags.add_argument("--ignore-eos", action="store_true", help="end answers by their length alone")
    flags.add_argument("--kv-tokens", type=int, default=65_536, help="room of continuous batching for KV, in tokens")
    flags.add_argument("--max-batch-tokens", type=int, help="tokens of a continuous step; the library's by default")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stdin ends; the exit code."""
    arguments = parser().parse_args(argv)
    # The library prints to stdout in places; events alone belong there.
    events_file, sys.stdout = sys.stdout, sys.stderr
    try:
        model = _load(arguments)
        events = EventLines(events_file, model.tokenizer)
        generation = _generation(arguments, model, events)
    except (ConfigError, NotFound) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  this process has no log
        return 2
    except PrefixCacheError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    events.write("ready", model=arguments.model, mode=arguments.mode)
    answer_lines(sys.stdin, generation, model.tokenizer, events)
    generation.close()
    return 0


def _load(arguments: argparse.Namespace) -> "PlainModel":
    from model_worker.models.plain import load_plain

    return load_plain(
        arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        ignore_eos=arguments.ignore_eos,
        num_threads=arguments.threads,
    )


def _generation(arguments: argparse.Namespace, model: "PlainModel", events: EventLines) -> Generation:
    from model_worker.models.plain import ContinuousGeneration, SequentialGeneration

    if arguments.mode == "sequential":
        return SequentialGeneration(model, events)
    return ContinuousGeneration(
        model, events, kv_tokens=arguments.kv_tokens, max_batch_tokens=arguments.max_batch_tokens
    )


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a forward that runs would be waited for

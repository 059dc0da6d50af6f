"""Validation of how to generate: sampling, stopping and the model's name."""

import math

from model_worker.engine.request import SamplingParams, StopConditions
from model_worker.rpc.backend import ModelDescription
from model_worker.rpc.bounds import (
    MAX_STOP_TEXT_BYTES,
    MAX_STOP_TEXTS,
    MAX_STOP_TOKEN_IDS,
    MIN_TEMPERATURE,
    check_count,
    check_size,
    check_token_ids,
    shown,
)
from prefixcache.errors import InvalidRequest, NotFound
from prefixcache.pb.v1 import worker_pb2


def check_model(name: str, description: ModelDescription) -> None:
    """Raise NotFound where another model is asked for than the one served; empty means that one."""
    if name and name != description.model:
        raise NotFound(f"model {shown(name)} is not served here; leave model empty or ask for {description.model!r}")


def read_sampling(sampling: worker_pb2.Sampling) -> SamplingParams:
    """Validate how tokens are chosen; raises InvalidRequest."""
    temperature = sampling.temperature
    if not (temperature == 0 or (math.isfinite(temperature) and temperature >= MIN_TEMPERATURE)):
        raise InvalidRequest(
            f"sampling.temperature is {temperature:g}; send 0 for greedy or a finite number from {MIN_TEMPERATURE:g} up"
        )
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise InvalidRequest(f"sampling.top_p is {top_p:g}; send a number above 0 and at most 1, or leave it out")
    seed = sampling.seed if sampling.HasField("seed") else None
    return SamplingParams(temperature=temperature, top_k=sampling.top_k, top_p=top_p, seed=seed)


def read_stopping(stopping: worker_pb2.Stopping, description: ModelDescription) -> StopConditions:
    """Validate when to stop; raises InvalidRequest."""
    _check_stop_texts(list(stopping.stop))
    stop_token_ids = list(stopping.stop_token_ids)
    check_count(len(stop_token_ids), field="stopping.stop_token_ids", limit=MAX_STOP_TOKEN_IDS)
    check_token_ids(stop_token_ids, field="stopping.stop_token_ids", vocab_size=description.vocab_size)
    return StopConditions(
        max_new_tokens=_max_new_tokens(stopping, description),
        stop=tuple(stopping.stop),
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=stopping.ignore_eos,
    )


def _max_new_tokens(stopping: worker_pb2.Stopping, description: ModelDescription) -> int | None:
    if not stopping.HasField("max_new_tokens"):
        return None
    if not 1 <= stopping.max_new_tokens <= description.max_model_len:
        raise InvalidRequest(
            f"stopping.max_new_tokens is {stopping.max_new_tokens}; "
            f"send 1 to {description.max_model_len}, the model's window, or leave it out"
        )
    return stopping.max_new_tokens


def _check_stop_texts(texts: list[str]) -> None:
    check_count(len(texts), field="stopping.stop", limit=MAX_STOP_TEXTS)
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequest(f"stopping.stop[{index}] is ''; send non-empty texts or leave it out")
        check_size(text, field=f"stopping.stop[{index}]", limit=MAX_STOP_TEXT_BYTES)

"""Validation of how to generate: sampling, stopping and the model's name."""

import math

from model_worker.engine.request import SamplingParams, StopConditions
from model_worker.rpc.backend import ModelDescription
from model_worker.rpc.bounds import (
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_OUTPUT_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SAMPLES,
    MAX_STOP_TEXT_BYTES,
    MAX_STOP_TEXTS,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
    check_count,
    check_range,
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


def read_sampling(sampling: worker_pb2.Sampling, description: ModelDescription) -> SamplingParams:
    """Validate how tokens are chosen; raises InvalidRequest."""
    temperature = sampling.temperature
    if not (temperature == 0 or (math.isfinite(temperature) and temperature >= MIN_TEMPERATURE)):
        raise InvalidRequest(
            f"sampling.temperature is {temperature:g}; send 0 for greedy or a finite number from {MIN_TEMPERATURE:g} up"
        )
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise InvalidRequest(f"sampling.top_p is {top_p:g}; send a number above 0 and at most 1, or leave it out")
    check_range(sampling.min_p, field="sampling.min_p", low=0, high=1)
    for name in ("presence_penalty", "frequency_penalty"):
        check_range(getattr(sampling, name), field=f"sampling.{name}", low=-MAX_OUTPUT_PENALTY, high=MAX_OUTPUT_PENALTY)
    return SamplingParams(
        temperature=temperature,
        top_k=sampling.top_k,
        top_p=top_p,
        seed=sampling.seed if sampling.HasField("seed") else None,
        min_p=sampling.min_p,
        repetition_penalty=_repetition_penalty(sampling),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=_logit_bias(sampling, description),
        logprobs=_num_logprobs(sampling),
        num_samples=_num_samples(sampling),
    )


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
        min_new_tokens=_min_new_tokens(stopping, description),
    )


def _repetition_penalty(sampling: worker_pb2.Sampling) -> float:
    if not sampling.HasField("repetition_penalty"):
        return 1.0
    penalty = sampling.repetition_penalty
    field = "sampling.repetition_penalty"
    check_range(penalty, field=field, low=MIN_REPETITION_PENALTY, high=MAX_REPETITION_PENALTY)
    return penalty


def _logit_bias(sampling: worker_pb2.Sampling, description: ModelDescription) -> tuple[tuple[int, float], ...]:
    biases = sorted(sampling.logit_bias.items())
    check_count(len(biases), field="sampling.logit_bias", limit=MAX_LOGIT_BIASES)
    for token, bias in biases:
        if token >= description.vocab_size:
            raise InvalidRequest(
                f"sampling.logit_bias has token id {token}; the model's token ids are 0 to {description.vocab_size - 1}"
            )
        check_range(bias, field=f"sampling.logit_bias[{token}]", low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS)
    return tuple(biases)


def _num_logprobs(sampling: worker_pb2.Sampling) -> int | None:
    if not sampling.HasField("logprobs"):
        return None
    if sampling.logprobs > MAX_LOGPROBS:
        raise InvalidRequest(f"sampling.logprobs is {sampling.logprobs}; send 0 to {MAX_LOGPROBS}, or leave it out")
    return sampling.logprobs


def _num_samples(sampling: worker_pb2.Sampling) -> int:
    if not sampling.HasField("n"):
        return 1
    if not 1 <= sampling.n <= MAX_SAMPLES:
        raise InvalidRequest(f"sampling.n is {sampling.n}; send 1 to {MAX_SAMPLES} samples, or leave it out for one")
    return sampling.n


def _min_new_tokens(stopping: worker_pb2.Stopping, description: ModelDescription) -> int:
    limit = stopping.max_new_tokens if stopping.HasField("max_new_tokens") else description.max_model_len
    if stopping.min_new_tokens > limit:
        raise InvalidRequest(
            f"stopping.min_new_tokens is {stopping.min_new_tokens}; send at most {limit}, "
            "the most tokens that may be generated"
        )
    return stopping.min_new_tokens


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

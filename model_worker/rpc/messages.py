"""From the engine's values to the messages of the wire.

Dataclass fields and message fields have equal names, so most messages are
filled by name; a missing name is an error of our own code.
"""

from typing import Final, TypeVar

from google.protobuf.message import Message

from model_worker.engine.request import Event, Finished, Progress, Started, TokensGenerated
from model_worker.engine.statistics import TierReport
from prefixcache.pb.v1 import admin_pb2, worker_pb2
from prefixcache.storage.registry import NamespaceEntry

AnyMessage = TypeVar("AnyMessage", bound=Message)

_OF_WRITES: Final = (
    "written_blocks",
    "written_bytes",
    "dropped_blocks",
    "failed_writes",
    "failed_renewals",
    "pending_bytes",
)
_OF_TIER: Final = ("num_entries", "used_bytes", "capacity_bytes", "failed_calls", "breakers")


def fill(message_type: type[AnyMessage], source: object, **given: object) -> AnyMessage:
    """Make a message whose fields are the attributes of ``source`` of the same names.

    Fields in ``given`` are taken from there. Nested messages are filled from
    nested attributes; repeated fields and maps take sequences and mappings.
    """
    empty = message_type()
    values: dict[str, object] = dict(given)
    for field in message_type.DESCRIPTOR.fields:
        if field.name not in given:
            default, value = getattr(empty, field.name), getattr(source, field.name)
            values[field.name] = fill(type(default), value) if isinstance(default, Message) else value
    return message_type(**values)


def response_of(event: Event) -> worker_pb2.GenerateResponse:
    """Make the message of the stream that carries ``event``."""
    if isinstance(event, Started):
        return worker_pb2.GenerateResponse(started=fill(worker_pb2.Started, event))
    if isinstance(event, Progress):
        return worker_pb2.GenerateResponse(progress=fill(worker_pb2.Progress, event))
    if isinstance(event, Finished):
        return worker_pb2.GenerateResponse(finished=_finished(event))
    return worker_pb2.GenerateResponse(tokens=_tokens(event))


def tier_message(report: TierReport) -> admin_pb2.TierStats:
    """Make the message on one tier."""
    stats = report.stats
    return fill(
        admin_pb2.TierStats,
        stats,
        **{name: getattr(stats.writes, name) for name in _OF_WRITES},
        **{name: getattr(stats.tier, name) for name in _OF_TIER},
        evicted_blocks=stats.tier.evicted,
        namespaces=[_namespace(entry, report.own) for entry in stats.namespaces],
    )


def _namespace(entry: NamespaceEntry, own: NamespaceEntry) -> admin_pb2.StoredNamespace:
    return admin_pb2.StoredNamespace(
        namespace_digest=entry.digest.hex(),
        fields=entry.fields,
        is_own=entry.digest == own.digest,
        differing_fields=entry.differing_fields(own),
    )


def _tokens(event: TokensGenerated) -> worker_pb2.Tokens:
    tokens = worker_pb2.Tokens(
        ids=event.token_ids,
        text=event.text,
        sample=event.sample,
        reason=_reason(event.finish_reason),
        matched_stop=event.matched_stop,
    )
    for logprobs in event.logprobs:
        top = [worker_pb2.TopLogprob(id=token, logprob=logprob) for token, logprob in logprobs.top]
        tokens.logprobs.add(logprob=logprobs.logprob, top=top)
    return tokens


def _finished(event: Finished) -> worker_pb2.Finished:
    record = event.record
    return worker_pb2.Finished(
        reason=_reason(record.finish_reason),
        usage=fill(worker_pb2.Usage, record),
        timings=fill(worker_pb2.Timings, record),
        matched_stop=record.matched_stop,
    )


def _reason(name: str) -> worker_pb2.FinishReason.ValueType:
    return worker_pb2.FinishReason.Value(f"FINISH_REASON_{name.upper() or 'UNSPECIFIED'}")

"""The table between exceptions and statuses, in both directions."""

import inspect

import grpc
import pytest
from grpc import aio

from prefixcache import errors
from prefixcache.rpc.status import (
    ERROR_OF,
    MAX_MESSAGE_CHARS,
    REQUEST_ID_KEY,
    STATUS_OF,
    from_rpc_error,
    to_status,
    trailers_of,
)

ALL_ERRORS = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.PrefixCacheError)]
ONE_WAY = {errors.TierUnavailable, errors.ConfigError, errors.PrefixCacheError}
NOBODY_THERE = "last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to connect to remote host: Connection refused"
ANSWERED = aio.Metadata((REQUEST_ID_KEY, "r1"))


def rpc_error(
    code: grpc.StatusCode, details: str, *, initial: aio.Metadata | None = None, trailing: aio.Metadata | None = None
) -> aio.AioRpcError:
    return aio.AioRpcError(code, initial, trailing, details)


def test_no_exception_is_unmapped() -> None:
    assert set(STATUS_OF) == set(ALL_ERRORS)


def test_every_failure_status_has_an_exception() -> None:
    assert set(ERROR_OF) == set(grpc.StatusCode) - {grpc.StatusCode.OK}


@pytest.mark.parametrize("error_type", ALL_ERRORS)
def test_exception_comes_back_as_itself(error_type: type[errors.PrefixCacheError]) -> None:
    code, message = to_status(error_type("what happened"), "r1")
    came_back = from_rpc_error(rpc_error(code, message, trailing=ANSWERED))
    if error_type in ONE_WAY:
        assert ERROR_OF[code] is type(came_back)
    else:
        assert type(came_back) is error_type


@pytest.mark.parametrize("error_type", ALL_ERRORS)
def test_message_is_kept_unless_it_is_a_fault_of_the_worker(error_type: type[errors.PrefixCacheError]) -> None:
    code, message = to_status(error_type("secret detail"), "r1")
    if code is grpc.StatusCode.INTERNAL:
        assert "secret" not in message
        assert "r1" in message
    else:
        assert message == "secret detail"


@pytest.mark.parametrize("error", [ValueError("secret"), KeyError("secret"), TimeoutError("secret"), OSError("secret")])
def test_unknown_exception_is_internal_and_its_text_stays(error: Exception) -> None:
    code, message = to_status(error, "r1")
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in message
    assert "r1" in message


def test_subclass_has_the_status_of_its_parent() -> None:
    class TooLong(errors.InvalidRequest):
        pass

    assert to_status(TooLong("x"), "r1") == (grpc.StatusCode.INVALID_ARGUMENT, "x")


def test_long_message_is_cut() -> None:
    _, message = to_status(errors.InvalidRequest("x" * 10_000), "r1")
    assert len(message) == MAX_MESSAGE_CHARS + 1


def test_no_connection_names_the_address_and_the_command_to_start_a_worker() -> None:
    error = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, NOBODY_THERE), address="127.0.0.1:9")
    assert isinstance(error, errors.EngineStopped)
    assert (
        str(error) == "no worker answers at 127.0.0.1:9 (Connection refused); start a worker with `prefixcache serve`"
    )


def test_unavailable_said_by_the_worker_keeps_its_message() -> None:
    error = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "stopping", trailing=ANSWERED), address="a:1")
    assert isinstance(error, errors.EngineStopped)
    assert str(error) == "stopping"


def test_connection_that_breaks_in_an_answer_is_told_from_none() -> None:
    error = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "Socket closed", initial=ANSWERED), address="a:1")
    assert "broke before its answer was complete" in str(error)
    assert "prefixcache serve" not in str(error)


@pytest.mark.parametrize("answered", [{"initial": ANSWERED}, {"initial": ANSWERED, "trailing": ANSWERED}])
def test_a_call_cancelled_after_it_was_begun_is_cancelled(answered: dict[str, aio.Metadata]) -> None:
    error = from_rpc_error(rpc_error(grpc.StatusCode.CANCELLED, "CANCELLED", **answered))
    assert isinstance(error, errors.RequestCancelled)


@pytest.mark.parametrize(
    ("details", "advice"),
    [
        ("SERVER: Received message larger than max (5 vs. 4)", "larger than max (5 vs. 4); send less in one message"),
        ("Concurrent RPC limit exceeded!", "limit exceeded!; try again later"),
    ],
)
def test_a_limit_of_grpcs_own_comes_with_what_to_do(details: str, advice: str) -> None:
    error = from_rpc_error(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, details), address="a:1")
    assert isinstance(error, errors.CapacityExceeded)
    assert str(error).startswith("gRPC refused the call to the worker at a:1: ")
    assert str(error).endswith(advice)


@pytest.mark.parametrize(("retry_after_s", "milliseconds"), [(1.5, "1500"), (0.0501, "51"), (0.0, "0")])
def test_when_to_try_again_comes_back_with_a_capacity_error(retry_after_s: float, milliseconds: str) -> None:
    error = errors.CapacityExceeded("full", retry_after_s=retry_after_s)
    trailers = trailers_of(error, "r1")
    assert trailers == ((REQUEST_ID_KEY, "r1"), ("retry-after-ms", milliseconds))
    came_back = from_rpc_error(rpc_error(*to_status(error, "r1"), trailing=aio.Metadata(*trailers)))
    assert isinstance(came_back, errors.CapacityExceeded)
    assert came_back.retry_after_s == int(milliseconds) / 1000


@pytest.mark.parametrize("error", [errors.CapacityExceeded("full"), errors.InvalidRequest("wrong"), ValueError("odd")])
def test_other_errors_say_nothing_of_when_to_try_again(error: Exception) -> None:
    assert trailers_of(error, "r1") == ((REQUEST_ID_KEY, "r1"),)


@pytest.mark.parametrize("value", ["", "-1", "1.5", "soon", "9" * 400, "٣"])
def test_a_time_that_cannot_be_meant_is_none(value: str) -> None:
    trailing = aio.Metadata((REQUEST_ID_KEY, "r1"), ("retry-after-ms", value))
    error = from_rpc_error(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", trailing=trailing))
    assert isinstance(error, errors.CapacityExceeded)
    assert error.retry_after_s is None


def test_unimplemented_says_that_the_worker_is_of_another_version() -> None:
    error = from_rpc_error(rpc_error(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"), address="a:1")
    assert isinstance(error, errors.NotFound)
    assert "version" in str(error)


def test_status_without_details_still_says_something() -> None:
    error = from_rpc_error(rpc_error(grpc.StatusCode.NOT_FOUND, "", trailing=ANSWERED), address="a:1")
    assert str(error) == "the worker at a:1 answered NOT_FOUND"


def test_bare_rpc_error_is_internal() -> None:
    assert isinstance(from_rpc_error(grpc.RpcError("odd")), errors.InternalError)

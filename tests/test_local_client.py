"""One behaviour through two doors: a server and its client, and the client with the engine in its process."""

import dataclasses
import gc
import inspect
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import model_worker
from model_worker import AsyncLocalClient, LocalClient
from model_worker.config import WorkerSettings
from model_worker.local import LocalSettings
from model_worker.worker import Worker
from prefixcache import AsyncClient, Client, errors
from tests.doors import OpenDoor, in_process, through_server

ROOT = Path(model_worker.__file__).parents[1]
PATIENCE_S = 20.0
LONG = "the rain in the land and the sand in the hand, and then the wind"
CHAT = [{"role": "user", "content": "and the band?"}]
OF_THE_RUN = {"timings", "latency", "request_id", "resident_bytes", "is_remembered", "load_average"}
PROMPTS: list[Any] = [LONG, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], CHAT]


@pytest.fixture
def doors(build_tiny: Callable[..., Worker], tiny_settings: dict[str, Any]) -> dict[str, OpenDoor]:
    return {"server": partial(through_server, build_tiny), "process": partial(in_process, tiny_settings)}


@pytest.fixture(params=["server", "process"])
def client(request: pytest.FixtureRequest, doors: dict[str, OpenDoor]) -> Iterator[Client]:
    with doors[request.param]() as client:
        yield client
        check_at_rest(client)


def check_at_rest(client: Client) -> None:
    """Wait until nothing runs; then nothing may be held."""
    deadline = time.monotonic() + PATIENCE_S
    while (engine := client.stats().engine).num_busy_slots or engine.num_running or engine.num_waiting:
        assert time.monotonic() < deadline, engine
        time.sleep(0.01)
    assert client.stats().cache.num_held_blocks == 0


def untimed(value: Any) -> Any:
    """A result without what differs from run to run."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {
        name: untimed(field) for name, field in fields.items() if not name.endswith("_s") and name not in OF_THE_RUN
    }


def settled(client: Client, answer: Any) -> Any:
    """The answer, once all its tokens that can be cached are."""
    deadline = time.monotonic() + PATIENCE_S
    while client.stats().engine.pending_recompute_tokens:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return answer


def everything(client: Client) -> list[Any]:
    """What every method gives, in an order that lets each see what the ones before have done."""
    options: dict[str, Any] = {"max_new_tokens": 7, "ignore_eos": True, "seed": 5, "logprobs": 2}
    answers = [
        settled(client, client.generate(prompt, temperature=temperature, **options))
        for prompt in PROMPTS
        for temperature in (0.0, 1.5)
    ]
    pieces = client.stream(LONG, max_new_tokens=5, ignore_eos=True)
    text = "".join(chunk.text for chunk in pieces)
    return [
        *answers,
        settled(client, client.chat(CHAT, max_new_tokens=3)),
        settled(client, client.generate(LONG, n=5, temperature=1.5, **options)),
        text,
        pieces.started,
        pieces.result,
        client.model_info(),
        client.diagnose(measure=False),
        client.tokenize(CHAT),
        client.lookup(LONG),
        client.warm(LONG + " and more in the end"),
        client.list_prefixes(),
        client.evict(1 << 12),
        client.stats().requests,
        client.clear(),
    ]


def test_every_call_gives_the_same_through_either_door(doors: dict[str, OpenDoor]) -> None:
    with doors["server"]() as client:
        through_server = everything(client)
    with doors["process"]() as client:
        in_process = everything(client)
    for ours, theirs in zip(in_process, through_server, strict=True):
        assert untimed(ours) == untimed(theirs)


def test_ping_is_answered(client: Client) -> None:
    assert 0 < client.ping() < PATIENCE_S


def test_progress_is_told_as_the_prompt_is_computed(client: Client) -> None:
    told: list[Any] = []
    answer = client.generate(LONG, max_new_tokens=1, on_progress=told.append)
    assert told
    assert told[-1].prompt_tokens == answer.usage.prompt_tokens


BAD_CALLS: dict[str, tuple[Callable[[Client], object], type[errors.PrefixCacheError], str]] = {
    "a bad field": (lambda client: client.generate("x", temperature=-1.0), errors.InvalidRequest, "temperature"),
    "a long prompt": (lambda client: client.generate([1] * 512), errors.InvalidRequest, "max_model_len"),
    "another model": (lambda client: client.generate("x", model="other"), errors.NotFound, "'other'"),
    "no such request": (lambda client: client.abort("nobody"), errors.NotFound, "nobody"),
    "a passed deadline": (lambda client: client.generate("x", timeout=0.0), errors.DeadlineExceeded, "timeout"),
    "a short deadline": (
        lambda client: client.generate(LONG, max_new_tokens=400, ignore_eos=True, timeout=0.05),
        errors.DeadlineExceeded,
        "allow a longer timeout",
    ),
    "a message beyond 16 MiB": (lambda client: client.generate("x" * (17 << 20)), errors.CapacityExceeded, "1677"),
    "a page that none gave": (lambda client: client.list_prefixes(page_token="x"), errors.InvalidRequest, "page"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_call_that_cannot_be_served_is_the_same_typed_error(client: Client, name: str) -> None:
    call, kind, message = BAD_CALLS[name]
    with pytest.raises(kind, match=message):
        call(client)


def test_a_request_id_comes_back(client: Client) -> None:
    assert client.generate("x", max_new_tokens=1, request_id="mine").request_id == "mine"
    assert len(client.generate("x", max_new_tokens=1).request_id) == 32


def test_two_requests_of_one_id_are_refused_and_abort_ends_the_first(client: Client) -> None:
    stream = client.stream(LONG, max_new_tokens=400, ignore_eos=True, request_id="twin")
    next(stream)
    with pytest.raises(errors.InvalidRequest, match="twin"):
        client.generate("x", request_id="twin")
    client.abort("twin")
    with pytest.raises(errors.RequestCancelled, match="Abort"):
        list(stream)


@pytest.mark.parametrize("leave", ["close", "with", "drop"])
def test_a_stream_left_early_leaves_nothing_behind(client: Client, leave: str) -> None:
    stream = client.stream(LONG, max_new_tokens=400, ignore_eos=True)
    if leave == "with":
        with stream:
            next(stream)
    else:
        next(stream)
    if leave == "close":
        stream.close()
    del stream
    check_at_rest(client)
    assert client.stats().requests.cancelled == 1


def test_a_closed_client_ends_what_runs_in_another_thread(client: Client) -> None:
    stream = client.stream(LONG, max_new_tokens=400, ignore_eos=True)
    next(stream)
    caught: list[BaseException] = []

    def read_on() -> None:
        try:
            list(stream)
        except errors.PrefixCacheError as error:
            caught.append(error)

    reader = threading.Thread(target=read_on)
    reader.start()
    stream.close()
    reader.join(PATIENCE_S)
    assert [type(error) for error in caught] == [errors.RequestCancelled]


def test_threads_share_a_client(client: Client) -> None:
    alone = client.generate(LONG, max_new_tokens=9, ignore_eos=True).token_ids
    answers: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(client.generate(LONG, max_new_tokens=9, ignore_eos=True).token_ids)
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert answers == [alone] * 6


def test_a_closed_local_client_has_no_thread_left(doors: dict[str, OpenDoor]) -> None:
    before = set(threading.enumerate())
    with doors["process"]() as client:
        next(client.stream(LONG, max_new_tokens=400, ignore_eos=True))
        assert {"prefixcache-client", "model_0"} <= {thread.name for thread in set(threading.enumerate()) - before}
    assert set(threading.enumerate()) <= before
    with pytest.raises(errors.RequestCancelled, match="closed"):
        client.stats()


def test_a_closed_local_client_gives_its_memory_back(
    doors: dict[str, OpenDoor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from model_worker import worker

    built: list[weakref.ref[Any]] = []
    build_on = worker.build_on

    def remember(*args: Any, **options: Any) -> Worker:
        made = build_on(*args, **options)
        built.extend(weakref.ref(part) for part in (made.engine, made.runner, made.slots, made.cache))
        return made

    monkeypatch.setattr(worker, "build_on", remember)
    with doors["process"]() as client:
        next(client.stream(LONG, max_new_tokens=400, ignore_eos=True))
    gc.collect()
    assert [reference() for reference in built] == [None] * 4


def test_two_local_clients_live_beside_each_other_and_share_nothing(doors: dict[str, OpenDoor]) -> None:
    with doors["process"]() as first, doors["process"](max_num_seqs=1) as second:
        answers = [client.generate(LONG, max_new_tokens=4, ignore_eos=True) for client in (first, second)]
        assert answers[0].token_ids == answers[1].token_ids
        assert [answer.usage.cached_prompt_tokens for answer in answers] == [0, 0]
        first.close()
        assert second.generate(LONG, max_new_tokens=4, ignore_eos=True).usage.cached_prompt_tokens > 0


@pytest.mark.usefixtures("build_tiny")
async def test_the_asynchronous_client_gives_the_same(
    tiny_settings: dict[str, Any], doors: dict[str, OpenDoor]
) -> None:
    async with AsyncLocalClient(**tiny_settings) as client:
        answer = await client.generate(LONG, max_new_tokens=7, ignore_eos=True)
    with doors["server"]() as other:
        assert untimed(other.generate(LONG, max_new_tokens=7, ignore_eos=True)) == untimed(answer)


@pytest.mark.usefixtures("build_tiny")
async def test_the_asynchronous_client_starts_with_its_first_call_as_well(tiny_settings: dict[str, Any]) -> None:
    client = AsyncLocalClient(**tiny_settings)
    assert (await client.model_info()).model == "tiny"
    await client.close()
    await client.close()
    with pytest.raises(errors.RequestCancelled, match="closed"):
        await client.model_info()


def test_a_model_that_does_not_exist_is_not_found_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(errors.NotFound, match="no model 'no-such-model'"):
        LocalClient(model="no-such-model")
    assert set(threading.enumerate()) <= before


def test_a_fault_while_building_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    from model_worker import worker

    def fail(*args: object, **options: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(worker, "build_on", fail)
    with pytest.raises(errors.InternalError, match="MemoryError: no more"):
        LocalClient()


@pytest.mark.parametrize("name", ["no_such_setting", "listen", "grace_s"])
def test_an_unknown_setting_is_a_type_error(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        LocalClient(**{name: 1})  # type: ignore[arg-type]


def test_a_setting_no_worker_can_have_is_a_config_error() -> None:
    with pytest.raises(errors.ConfigError, match="max_num_seqs is 0"):
        LocalClient(max_num_seqs=0)


def test_the_settings_are_those_of_a_worker_without_its_socket() -> None:
    of_process = {"listen", "is_insecure", "grace_s", "stops_at_eof"}
    expected = {name: kind for name, kind in get_type_hints(WorkerSettings).items() if name not in of_process}
    assert get_type_hints(LocalSettings) == expected


@pytest.mark.parametrize(("local", "networked"), [(LocalClient, Client), (AsyncLocalClient, AsyncClient)])
def test_a_local_client_is_a_client(local: type, networked: type) -> None:
    assert issubclass(local, networked)
    overridden = {name for name in vars(local) if inspect.isfunction(vars(local)[name])}
    assert overridden <= {"__init__", "__aenter__", "close"}


def test_importing_the_package_loads_nothing_and_the_client_no_torch() -> None:
    code = (
        "import sys, os, model_worker\n"
        "print([name for name in ('grpc', 'torch') if name in sys.modules], 'GOMP_SPINCOUNT' in os.environ)\n"
        "from model_worker import LocalClient\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:2] == ["[] True", "False"]


def test_a_program_that_forgets_to_close_ends_quietly(tiny_settings: dict[str, Any]) -> None:
    code = (
        "from model_worker import LocalClient\n"
        f"client = LocalClient(**{tiny_settings!r})\n"
        "print(client.generate('x', max_new_tokens=40, ignore_eos=True).usage.completion_tokens)\n"
        "print(len(next(client.stream('y', max_new_tokens=400, ignore_eos=True)).token_ids))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (result.stdout, result.stderr, result.returncode) == ("40\n1\n", "", 0)

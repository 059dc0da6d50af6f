import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import prefixcache
from prefixcache import AsyncClient, Client, ConfigError, RequestCancelled
from prefixcache.client.loop_thread import LoopThread
from tests.fakes.recording_servicer import RecordingServicer, Step, finished_stream, serving_in_thread

ROOT = Path(prefixcache.__file__).parents[1]
SLOW: list[Step] = [*finished_stream("Hello", " world")[:2], 30.0]


def num_loop_threads() -> int:
    return sum(thread.name == "prefixcache-client" for thread in threading.enumerate())


def test_one_client_serves_many_threads(client: Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: client.generate(f"prompt {number}").text, range(64)))
    assert answers == ["Hello world"] * 64


def test_many_clients_in_many_threads_make_no_noise(
    address: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def ask(_: int) -> str:
        with Client(address) as client:
            return [client.generate("x").text for _ in range(10)][-1]

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(8))) == {"Hello world"}
    assert [record for record in caplog.records if record.levelname in {"ERROR", "WARNING"}] == []
    assert capfd.readouterr().err == ""


def test_closing_the_client_ends_calls_of_other_threads(servicer: RecordingServicer, address: str) -> None:
    servicer.script("Generate", SLOW)
    client = Client(address)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.generate, "x")
        while not servicer.calls:
            time.sleep(0.005)
        client.close()
        with pytest.raises(RequestCancelled):
            answer.result(5)


def test_a_closed_client_refuses_calls_and_may_be_closed_again(client: Client) -> None:
    client.stats()
    client.close()
    client.close()
    with pytest.raises(RequestCancelled, match="closed"):
        client.stats()


def test_a_client_that_was_never_used_starts_no_thread() -> None:
    before = num_loop_threads()
    with Client("127.0.0.1:1"):
        assert num_loop_threads() == before


def test_a_dropped_client_stops_its_thread(address: str) -> None:
    before = num_loop_threads()
    client = Client(address)
    client.stats()
    assert num_loop_threads() == before + 1
    del client
    gc.collect()
    assert num_loop_threads() == before


def test_an_interrupt_while_waiting_cancels_the_call(servicer: RecordingServicer, client: Client) -> None:
    servicer.script("Generate", SLOW)

    def interrupt() -> None:
        while not servicer.calls:
            time.sleep(0.005)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        client.generate("x")
    thread.join()
    end = time.monotonic() + 5
    while not servicer.num_cancelled:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_an_error_that_nobody_waits_for_any_more_makes_no_noise(caplog: pytest.LogCaptureFixture) -> None:
    loop = LoopThread()
    has_started = threading.Event()

    async def fail_when_cancelled() -> None:
        has_started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise RequestCancelled("the stream was closed") from None

    def interrupt() -> None:
        has_started.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(fail_when_cancelled)
    thread.join()
    loop.close(lambda: asyncio.sleep(0))
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_an_interrupted_client_can_go_on(servicer: RecordingServicer, client: Client) -> None:
    test_an_interrupt_while_waiting_cancels_the_call(servicer, client)
    servicer.script("Generate", finished_stream("fine"))
    assert client.generate("x").text == "fine"


async def test_an_async_client_of_another_loop_is_refused(address: str) -> None:
    client = AsyncClient(address)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(client.stats())).result(10)
    with pytest.raises(ConfigError, match="event loop"):
        await client.stats()


FORK = """
import os, sys
from prefixcache import Client, ConfigError
client = Client(sys.argv[1], timeout=10)
if sys.argv[2] == "used":
    client.stats()
child = os.fork()
if child == 0:
    try:
        client.stats()
        os._exit(10)
    except ConfigError as error:
        os._exit(11 if "forked" in str(error) else 12)
    except BaseException:
        os._exit(13)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
client.stats()
"""


@pytest.mark.parametrize(("use", "code"), [("used", 11), ("unused", 10)])
def test_a_client_works_after_a_fork_only_if_it_was_not_used_before(address: str, use: str, code: int) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FORK, address, use], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (result.stdout.strip(), result.returncode) == (str(code), 0), result.stderr


def test_a_program_that_forgets_to_close_ends_quietly(address: str) -> None:
    code = (
        "import sys; from prefixcache import Client\n"
        "client = Client(sys.argv[1]); stream = client.stream('x'); print(next(stream).text)"
    )
    result = subprocess.run([sys.executable, "-c", code, address], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr, result.returncode) == ("Hello\n", "", 0)


def test_the_environments_proxy_is_not_used(servicer: RecordingServicer) -> None:
    code = "import sys; from prefixcache import Client\nprint(Client(sys.argv[1], timeout=5).generate('x').text)"
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:1", "https_proxy": "http://127.0.0.1:1"}
    with serving_in_thread(servicer) as address:
        result = subprocess.run(
            [sys.executable, "-c", code, address], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
        )
    assert result.stdout == "Hello world\n", result.stderr

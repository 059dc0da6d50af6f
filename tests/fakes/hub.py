"""A model hub on loopback: enough of the Hugging Face hub's HTTP API for ``snapshot_download``."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """Repositories by id, each with files by name; every revision is ``COMMIT``, and ``main`` and ``v1`` exist.

    ``faults`` maps the beginning of a path to the status and error code it is answered
    with. ``served`` lists the files that were sent.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    faults: dict[str, tuple[int, str]] = field(default_factory=dict)
    served: list[str] = field(default_factory=list)
    address: str = ""


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """Serve ``hub`` on a free port; its ``address`` is the endpoint."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self, hub)

        def do_HEAD(self) -> None:
            answer(self, hub)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def answer(request: BaseHTTPRequestHandler, hub: Hub) -> None:
    path = urlsplit(request.path).path
    for beginning, (status, code) in hub.faults.items():
        if path.startswith(beginning):
            send(request, b"", status=status, headers={"X-Error-Code": code} if code else {})
            return
    words = path.strip("/").split("/")
    if words[:2] == ["api", "models"]:
        answer_api(request, hub, words[2:])
    elif "resolve" in words:
        answer_file(request, hub, words)
    else:
        send(request, b"", status=404)


def answer_api(request: BaseHTTPRequestHandler, hub: Hub, words: list[str]) -> None:
    repository, what = "/".join(words[:2]), words[2:]
    files = hub.repositories.get(repository)
    if files is None:
        send(request, b"", status=401, headers={"X-Error-Code": "RepoNotFound"})
    elif what[:1] == ["tree"]:
        send_json(
            request,
            [{"type": "file", "path": name, "size": len(data), "oid": oid(data)} for name, data in files.items()],
        )
    elif what[1:] in ([], ["main"], ["v1"], [COMMIT]):
        send_json(request, {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
    else:
        send(request, b"", status=404, headers={"X-Error-Code": "RevisionNotFound"})


def answer_file(request: BaseHTTPRequestHandler, hub: Hub, words: list[str]) -> None:
    name = "/".join(words[4:])
    data = hub.repositories.get("/".join(words[:2]), {}).get(name)
    if data is None:
        send(request, b"", status=404, headers={"X-Error-Code": "EntryNotFound"})
        return
    if request.command == "GET":
        hub.served.append(name)
    send(request, data, headers={"ETag": f'"{oid(data)}"', "X-Repo-Commit": COMMIT})


def file_entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": oid(data)}


def oid(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def send_json(request: BaseHTTPRequestHandler, value: object) -> None:
    send(request, json.dumps(value).encode(), headers={"Content-Type": "application/json"})


def send(
    request: BaseHTTPRequestHandler, body: bytes, *, status: int = 200, headers: dict[str, str] | None = None
) -> None:
    request.send_response(status)
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(body)

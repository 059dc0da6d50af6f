"""A worker process without a model; what it does depends on the name of the model it is to serve.

``broken`` fails at start, ``chatty`` prints other lines before the ready line,
``stubborn`` ignores SIGTERM, ``slow`` answers nothing, ``exit-9`` stops with
that code. The file named by FAKE_WORKER_RECORD gets its process id and flags.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from prefixcache.pb.v1 import worker_pb2
from tests.fakes.recording_servicer import RecordingServicer, serving


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


async def main() -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        on_signal = (lambda: None) if flag("--model") == "stubborn" else stop.set
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
    servicer = RecordingServicer()
    info = worker_pb2.GetModelInfoResponse(model="fake", device="cpu", dtype="bfloat16", block_size=4)
    info.has_chat_template = True
    servicer.script("GetModelInfo", info)
    if flag("--model") == "slow":
        servicer.script("Generate", [60.0])
    async with serving(servicer, address=flag("--listen")) as address:
        print(json.dumps({"event": "ready", "address": address, "model": flag("--model")}), flush=True)
        await stop.wait()
    print("a line of the worker's log", file=sys.stderr)


if __name__ == "__main__":
    if record := os.environ.get("FAKE_WORKER_RECORD"):
        Path(record).write_text(json.dumps({"pid": os.getpid(), "flags": sys.argv[1:]}))
    if flag("--model") == "broken":
        sys.exit("there is no model named broken")
    if flag("--model") == "chatty":
        print('not json\n{"event": "loading"}\n[]', flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
    sys.exit(9 if flag("--model") == "exit-9" else 0)

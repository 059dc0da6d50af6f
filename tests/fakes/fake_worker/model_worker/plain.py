"""A process that speaks like plain transformers, without a model.

A text prompt says what happens: ``fail`` fails, ``die`` ends the process, ``hang`` is
never answered, anything else is answered with one token a character. With the model
``broken`` it ends before it is ready. FAKE_WORKER_RECORD gets its process id and flags.
"""

import json
import os
import sys
from pathlib import Path


def write(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def answer(number: int, prompt: str) -> None:
    if prompt == "die":
        os._exit(3)
    if prompt == "fail":
        write("failed", id=number, message="no such luck")
    elif prompt != "hang":
        for _ in prompt:
            write("tokens", id=number, num_tokens=1)
        ids = [ord(character) for character in prompt]
        write("finished", id=number, token_ids=ids, text=prompt.upper(), prompt_tokens=len(prompt))


if __name__ == "__main__":
    if record := os.environ.get("FAKE_WORKER_RECORD"):
        Path(record).write_text(json.dumps({"pid": os.getpid(), "flags": sys.argv[1:]}))
    if "broken" in sys.argv:
        sys.exit("there is no model named broken")
    write("ready")
    for line in sys.stdin:
        fields = json.loads(line)
        answer(fields["id"], fields.get("text") or "tokens")

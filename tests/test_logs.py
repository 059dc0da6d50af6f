import json
import logging
import sys

import pytest

from model_worker.logs import JsonFormatter, TextFormatter, set_up_logging


def record(message: str = "request %s finished", *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("model_worker", logging.INFO, __file__, 1, message, args or ("r1",), None)
    made.__dict__.update(extra)
    return made


FIELDS = {"request_id": "r1", "outcome": "finished", "matched_stop": "", "prompt_tokens": 7}


def test_json_is_one_object_a_line_with_the_requests_record() -> None:
    line = JsonFormatter().format(record(record=FIELDS))
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["message"] == "request r1 finished"
    assert (entry["level"], entry["logger"], entry["prompt_tokens"]) == ("info", "model_worker", 7)
    assert entry["time"].endswith("Z")


def test_json_has_the_id_and_status_of_a_refused_call() -> None:
    entry = json.loads(JsonFormatter().format(record(request_id="r1", status="INVALID_ARGUMENT")))
    assert (entry["request_id"], entry["status"]) == ("r1", "INVALID_ARGUMENT")


def test_json_keeps_a_traceback_in_its_line() -> None:
    try:
        raise ValueError("no\nnewlines")
    except ValueError:
        made = record()
        made.exc_info = sys.exc_info()
    line = JsonFormatter().format(made)
    assert "\n" not in line
    assert "ValueError: no\nnewlines" in json.loads(line)["traceback"]


def test_text_has_the_records_pairs_without_empty_ones() -> None:
    line = TextFormatter().format(record(record=FIELDS))
    assert line.endswith("INFO request r1 finished outcome=finished prompt_tokens=7")


@pytest.mark.parametrize(("log_format", "begins"), [("json", "{"), ("text", "2")])
def test_the_log_goes_to_stderr_and_libraries_are_quiet(
    log_format: str, begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        set_up_logging(level="info", log_format=log_format)
        logging.getLogger("model_worker").info("seen")
        logging.getLogger("transformers").warning("not seen")
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(begins)
    assert "seen" in captured.err
    assert "not seen" not in captured.err

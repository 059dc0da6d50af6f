"""The worker's log: one line an event on stderr, as text or JSON."""

import json
import logging
import sys
import time

QUIET_LIBRARIES = ("transformers", "grpc", "asyncio", "urllib3", "filelock", "huggingface_hub", "gguf")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and a request's id, status or record if it has them."""

    def format(self, record: logging.LogRecord) -> str:
        """Write ``record`` as JSON."""
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: getattr(record, name) for name in ("request_id", "status") if hasattr(record, name)}
        entry |= getattr(record, "record", {})
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class TextFormatter(logging.Formatter):
    """Time, level, message, and a request's record as ``name=value`` pairs."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's own name
        """Write one line; the record's pairs follow the message."""
        fields: dict[str, object] = getattr(record, "record", {})
        pairs = "".join(f" {name}={value}" for name, value in fields.items() if name != "request_id" and value != "")
        return super().formatMessage(record) + pairs


def set_up_logging(*, level: str, log_format: str) -> None:
    """Send this process's log to stderr; libraries only from warnings up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)

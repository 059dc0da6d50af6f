"""The bounds of every field a caller can set, and how a bad value is shown.

The same figures stand in the comments of the protos.
"""

from typing import Final

from prefixcache.errors import InvalidRequest
from prefixcache.rpc.status import MAX_REQUEST_ID_CHARS, is_request_id

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
MAX_PROMPT_BYTES: Final = 8 * 1024 * 1024
LONG_PROMPT_BYTES: Final = 256 * 1024
LONG_PROMPT_IDS: Final = 64 * 1024
MAX_PROMPT_IDS: Final = 1024 * 1024
MAX_CHAT_MESSAGES: Final = 4096
MAX_TOOLS: Final = 128
MAX_TOOLS_BYTES: Final = 1024 * 1024
MAX_ROLE_BYTES: Final = 64
MAX_CACHE_SALT_BYTES: Final = 256
MAX_STOP_TEXTS: Final = 16
MAX_STOP_TEXT_BYTES: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 64
MIN_TEMPERATURE: Final = 1e-3
MIN_REPETITION_PENALTY: Final = 1e-3
MAX_REPETITION_PENALTY: Final = 1e3
MAX_OUTPUT_PENALTY: Final = 2.0
DEFAULT_PAGE_SIZE: Final = 100
MAX_PAGE_SIZE: Final = 1000
MAX_LOGPROBS: Final = 20
MAX_SAMPLES: Final = 64
MAX_LOGIT_BIASES: Final = 300
MAX_LOGIT_BIAS: Final = 100.0
MAX_PRIORITY: Final = 100

_SHOWN_CHARS: Final = 60


def shown(value: str) -> str:
    """Quote a caller's text for a message, cut to a readable length."""
    return repr(value) if len(value) <= _SHOWN_CHARS else f"{value[:_SHOWN_CHARS]!r}… ({len(value)} characters)"


def check_size(value: str, *, field: str, limit: int) -> int:
    """Give the bytes of ``value`` in UTF-8; raise InvalidRequest where they are more than ``limit``."""
    num_bytes = len(value.encode())
    if num_bytes > limit:
        raise InvalidRequest(f"{field} has {num_bytes} bytes; send at most {limit}")
    return num_bytes


def check_count(count: int, *, field: str, limit: int) -> None:
    """Raise InvalidRequest where a list has more than ``limit`` entries."""
    if count > limit:
        raise InvalidRequest(f"{field} has {count} entries; send at most {limit}")


def check_range(value: float, *, field: str, low: float, high: float) -> None:
    """Raise InvalidRequest where a number, NaN included, is not within its bounds."""
    if not low <= value <= high:
        raise InvalidRequest(f"{field} is {value:g}; send a number from {low:g} to {high:g}, or leave it out")


def check_token_ids(ids: list[int], *, field: str, vocab_size: int) -> None:
    """Raise InvalidRequest at the first id outside the vocabulary."""
    if ids and max(ids) >= vocab_size:
        index = next(i for i, token in enumerate(ids) if token >= vocab_size)
        raise InvalidRequest(f"{field}[{index}] is {ids[index]}; the model's token ids are 0 to {vocab_size - 1}")


def check_cache_salt(cache_salt: str) -> None:
    """Raise InvalidRequest where the salt is too long; the salt itself is never shown."""
    check_size(cache_salt, field="cache_salt", limit=MAX_CACHE_SALT_BYTES)


def check_priority(priority: int) -> None:
    """Raise InvalidRequest where a priority is out of its bounds."""
    check_range(priority, field="priority", low=-MAX_PRIORITY, high=MAX_PRIORITY)


def check_request_id(request_id: str) -> None:
    """Raise InvalidRequest where this cannot be the id of a request."""
    if not is_request_id(request_id):
        raise InvalidRequest(
            f"request_id is {shown(request_id)}; send 1 to {MAX_REQUEST_ID_CHARS} letters, digits or '._:-'"
        )

from typing import Any

import pytest

from model_worker.config import WorkerSettings
from prefixcache.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "tpu"),
        ("dtype", "int3"),
        ("max_model_len", 0),
        ("block_size", -8),
        ("num_threads", 0),
        ("num_threads", 1_025),
        ("max_num_seqs", 0),
        ("max_num_seqs", "many"),
        ("max_num_seqs", True),
        ("default_max_new_tokens", 0),
        ("max_waiting", -1),
        ("prefill_blocks", 0),
        ("max_reorder_wait_s", -1.0),
        ("max_reorder_wait_s", float("inf")),
        ("l1_bytes", -1),
        ("l1_bytes", 1.5),
        ("parking_bytes", -1),
        ("grace_s", -1.0),
        ("grace_s", float("nan")),
        ("grace_s", float("inf")),
    ],
)
def test_a_value_no_worker_can_have_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field} is .*; give "):
        WorkerSettings(**{field: value})


@pytest.mark.parametrize("field", ["max_model_len", "block_size", "num_threads"])
def test_what_is_chosen_at_start_may_be_left_open(field: str) -> None:
    open_field: dict[str, Any] = {field: None}
    assert getattr(WorkerSettings(**open_field), field) is None


def test_nothing_may_wait_and_nothing_be_cached() -> None:
    settings = WorkerSettings(max_waiting=0, l1_bytes=0)
    assert (settings.max_waiting, settings.l1_bytes) == (0, 0)

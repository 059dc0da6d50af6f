"""Two identities side by side: every difference by name, none where they are equal."""

import json
from typing import Any

from prefixcache.client.diagnosis import Diagnosis

CONFIG = {"hidden_size": 64, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}


def diagnosis(**identity: str) -> Diagnosis:
    given: dict[str, Any] = dict.fromkeys(Diagnosis.__dataclass_fields__)
    return Diagnosis(**given | {"namespace_fields": identity})


def test_equal_identities_do_not_differ() -> None:
    one = diagnosis(block_size="64", model_config=json.dumps(CONFIG))
    assert one.differences(diagnosis(model_config=json.dumps(CONFIG), block_size="64")) == {}


def test_each_field_that_differs_is_named_with_both_values() -> None:
    one, other = (
        diagnosis(mode="strict", block_size="64", rope="a"),
        diagnosis(mode="strict", block_size="16", rope="b"),
    )
    assert one.differences(other) == {"block_size": ("64", "16"), "rope": ("a", "b")}


def test_a_field_that_one_side_lacks_is_empty_there() -> None:
    assert diagnosis(new="x").differences(diagnosis(old="y")) == {"new": ("x", ""), "old": ("", "y")}


def test_a_config_is_taken_apart_to_the_value_that_differs() -> None:
    rope = CONFIG["rope_parameters"]
    assert isinstance(rope, dict)
    changed = CONFIG | {"rope_parameters": rope | {"rope_theta": 500000.0}, "hidden_act": "silu"}
    found = diagnosis(model_config=json.dumps(CONFIG)).differences(diagnosis(model_config=json.dumps(changed)))
    assert found == {
        "model_config.hidden_act": ("", "silu"),
        "model_config.rope_parameters.rope_theta": ("10000.0", "500000.0"),
    }


def test_text_that_is_no_json_is_compared_whole() -> None:
    assert diagnosis(model_config="{").differences(diagnosis(model_config="{}")) == {"model_config": ("{", "{}")}

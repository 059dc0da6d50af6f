from dataclasses import fields, replace
from typing import Any

import pytest

from prefixcache.core.namespace import Namespace, canonical_config, scope_root, scope_salt
from prefixcache.errors import ConfigError, InvalidRequest

NAMESPACE = Namespace(
    format_version=1,
    weights_digest="aa",
    adapter_digest="bb",
    model_config='{"hidden_size":576}',
    rope_digest="cc",
    compute_dtype="bfloat16",
    kv_dtype="bfloat16",
    block_size=64,
    engine_version="1",
    mode="strict",
    profile={"device": "cpu", "canary": "dd"},
)
GOLDEN_DIGEST = "f49795b4a32de84bae97d4a4fc530c7422bcb455c2ea043f908ff9c15ba0e64f"
GOLDEN_ROOT = "93205c0a45b59020ae3f7c3d146d6a34d3b0e4789520f9cb7665d8edb141631f"


def test_the_digest_never_changes() -> None:
    assert NAMESPACE.digest().hex() == GOLDEN_DIGEST


def test_the_scope_root_never_changes() -> None:
    salt = scope_salt("acme", "blue", secret=b"secret")
    assert scope_root(NAMESPACE.digest(), salt).hex() == GOLDEN_ROOT


@pytest.mark.parametrize("name", [f.name for f in fields(Namespace) if f.name != "profile"])
def test_every_field_changes_the_digest(name: str) -> None:
    value = getattr(NAMESPACE, name)
    changed: Any = {name: value + 1 if isinstance(value, int) else value + "x"}
    other = replace(NAMESPACE, **changed)
    assert other.digest() != NAMESPACE.digest()


@pytest.mark.parametrize(
    "profile", [{}, {"device": "cpu"}, {"device": "cuda", "canary": "dd"}, {"device": "dd", "canary": "cpu"}]
)
def test_the_profile_changes_the_digest(profile: dict[str, str]) -> None:
    assert replace(NAMESPACE, profile=profile).digest() != NAMESPACE.digest()


def test_the_order_of_the_profile_changes_nothing() -> None:
    other = replace(NAMESPACE, profile={"canary": "dd", "device": "cpu"})
    assert other.digest() == NAMESPACE.digest()
    assert other == NAMESPACE


def test_text_moved_from_one_field_to_the_next_changes_the_digest() -> None:
    one = replace(NAMESPACE, weights_digest="ab", rope_digest="c")
    other = replace(NAMESPACE, weights_digest="a", rope_digest="bc")
    assert one.digest() != other.digest()


def test_a_namespace_cannot_be_changed_through_the_profile_it_was_given() -> None:
    profile = {"device": "cpu"}
    namespace = replace(NAMESPACE, profile=profile)
    before = namespace.digest()
    profile["device"] = "cuda"
    assert namespace.digest() == before
    with pytest.raises(TypeError):
        namespace.profile["device"] = "cuda"  # type: ignore[index]


def test_fields_name_everything_as_text() -> None:
    named = NAMESPACE.fields()
    assert named["block_size"] == "64"
    assert named["profile.canary"] == "dd"
    assert len(named) == len(fields(Namespace)) - 1 + len(NAMESPACE.profile)


def test_a_config_is_canonical_whatever_its_order_and_its_names() -> None:
    one = canonical_config({"b": {"y": 1, "x": (1, 2)}, "a": 1, "_name_or_path": "here"})
    other = canonical_config({"a": 1, "b": {"x": [1, 2], "y": 1, "transformers_version": "5"}, "id2label": {0: "no"}})
    assert one == other == '{"a":1,"b":{"x":[1,2],"y":1}}'


@pytest.mark.parametrize("name", ["dtype", "torch_dtype", "_model_name_or_path"])
def test_a_config_leaves_out_how_and_from_where_it_was_loaded(name: str) -> None:
    assert canonical_config({"a": {name: "x"}, name: "x"}) == canonical_config({"a": {}, name: "y"}) == '{"a":{}}'


@pytest.mark.parametrize("name", ["rope_theta", "hidden_act", "sliding_window", "rms_norm_eps", "attention_bias"])
def test_a_config_keeps_what_decides_kv(name: str) -> None:
    assert canonical_config({name: 1}) != canonical_config({name: 2})


def test_a_config_without_a_json_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="canonical JSON"):
        canonical_config({"hidden_act": object()})


def test_salts_differ_by_tenant_by_salt_and_by_secret() -> None:
    salts = {
        scope_salt(tenant, salt, secret=secret)
        for tenant, salt in (("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc"))
        for secret in (b"one", b"two")
    }
    assert len(salts) == 8


def test_only_the_local_tenant_needs_no_secret() -> None:
    assert len(scope_salt("local", "", secret=None)) == 32
    with pytest.raises(ConfigError, match="secret_file"):
        scope_salt("acme", "", secret=None)


def test_a_salt_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cache_salt"):
        scope_salt("local", "\ud800", secret=None)

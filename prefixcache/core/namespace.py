"""Identity: everything besides the tokens that decides a block's KV.

The digest of a ``Namespace``, salted by tenant, is the root of a hash chain and
of a tree, so no tier can serve a block across any of these fields.
"""

import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from hashlib import sha256
from types import MappingProxyType

from prefixcache.errors import ConfigError, InvalidRequest

LOCAL_TENANT = "local"

_CONFIG_FIELDS_WITHOUT_EFFECT_ON_KV = frozenset(
    {
        "_name_or_path",
        "_model_name_or_path",
        "name_or_path",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "architectures",
        "id2label",
        "label2id",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "repetition_penalty",
        "num_beams",
        "max_length",
        "min_length",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The identity of a worker's KV; two workers share blocks only where all of it is equal.

    Digests are hex strings; ``model_config`` is ``canonical_config``'s text;
    ``adapter_digest`` is empty without an adapter; ``profile`` is the numerics
    profile (device, versions, threads, canary digest, …), empty where ``mode``
    shares across profiles.
    """

    format_version: int
    weights_digest: str
    adapter_digest: str = ""
    model_config: str
    rope_digest: str
    compute_dtype: str
    kv_dtype: str
    block_size: int
    engine_version: str
    mode: str = "strict"
    profile: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "profile", MappingProxyType(dict(self.profile)))

    def fields(self) -> dict[str, str]:
        """Return every field by name as text, the profile's as ``profile.<name>``, sorted by name."""
        named = {f.name: str(getattr(self, f.name)) for f in fields(self) if f.name != "profile"}
        named |= {f"profile.{name}": value for name, value in self.profile.items()}
        return dict(sorted(named.items()))

    def digest(self) -> bytes:
        """Return the 32-byte SHA-256 over all fields, names and values length-prefixed.

        >>> one = Namespace(format_version=1, weights_digest="ab", model_config="{}", rope_digest="cd",
        ...     compute_dtype="bfloat16", kv_dtype="bfloat16", block_size=64, engine_version="1")
        >>> one.digest().hex()[:16]
        '3f7ef057f0791a55'
        """
        named = self.fields()
        return sha256(_length_prefixed(text for pair in named.items() for text in pair)).digest()


def canonical_config(config: Mapping[str, object]) -> str:
    """Return a model config as canonical JSON, without names, versions, generation defaults and the loaded dtype.

    That dtype follows from the device; where it counts, the numerics profile has it. Raises
    ConfigError where a value has no JSON form.

    >>> canonical_config({"vocab_size": 7, "hidden_size": 2, "transformers_version": "5.0", "top_p": 0.9})
    '{"hidden_size":2,"vocab_size":7}'
    """
    kept = _without_effectless(config)
    try:
        return json.dumps(kept, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the model config has no canonical JSON form: {error}; keep plain values in it") from error


def _without_effectless(value: object) -> object:
    if isinstance(value, Mapping):
        kept = {k: v for k, v in value.items() if k not in _CONFIG_FIELDS_WITHOUT_EFFECT_ON_KV}
        return {k: _without_effectless(v) for k, v in kept.items()}
    if isinstance(value, list | tuple):
        return [_without_effectless(item) for item in value]
    return value


def scope_salt(tenant: str, cache_salt: str, *, secret: bytes | None) -> bytes:
    """Return the 32-byte salt of one tenant and one caller-chosen ``cache_salt``.

    HMAC-SHA256(secret, tenant and cache_salt length-prefixed). The tenant ``local``
    needs no secret. Raises ConfigError for another tenant without one, and
    InvalidRequest for text that is not valid Unicode.

    >>> scope_salt("local", "", secret=None) == scope_salt("local", "a", secret=None)
    False
    """
    if secret is None and tenant != LOCAL_TENANT:
        raise ConfigError(f"tenant {tenant!r} needs a secret to salt its cache; configure secret_file")
    try:
        message = _length_prefixed((tenant, cache_salt))
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"tenant {tenant!r} or cache_salt {cache_salt!r} is not valid Unicode text") from error
    return hmac.digest(secret or b"", message, "sha256")


def scope_root(namespace_digest: bytes, salt: bytes) -> bytes:
    """Return the 32-byte virtual block that starts a scope's chain and names its tree.

    >>> len(scope_root(bytes(32), scope_salt("local", "", secret=None)))
    32
    """
    return sha256(namespace_digest + salt).digest()


def _length_prefixed(texts: Iterable[str]) -> bytes:
    encoded = (text.encode() for text in texts)
    return b"".join(len(part).to_bytes(8, "little") + part for part in encoded)

"""What a mode of numerics lets the engine do: one value, made at start, that is asked instead of the mode's name."""

from dataclasses import dataclass, replace
from typing import Final

from prefixcache.core.namespace import Namespace

STRICT_MODE: Final = "strict"
FAST_MODE: Final = "fast"
FAST_PREFILL_TOKENS: Final = {"cpu": 256, "cuda": 1_024}


@dataclass(frozen=True, slots=True)
class NumericsPolicy:
    """The freedoms of one mode, which ``strict`` has none of.

    A forward of a prompt holds at most ``max_forward_blocks`` blocks. With ``publishes_decoded_kv``
    the blocks that generated tokens complete are published as decode computed them, else they are
    computed again. With ``shares_across_profiles`` workers whose machines round otherwise use
    each other's blocks.
    """

    mode: str
    max_forward_blocks: int
    publishes_decoded_kv: bool
    shares_across_profiles: bool

    def forward_blocks(self, num_left: int, *, delays_streams: bool) -> int:
        """Blocks of a prompt for the next forward, of an iteration that may hold ``num_left`` more of them.

        Only running streams are to be spared: where there are none, a forward is as large as it may be.
        """
        return min(num_left, self.max_forward_blocks) if delays_streams else self.max_forward_blocks

    def namespace(self, strict: Namespace) -> Namespace:
        """The namespace of this mode's blocks, for a worker whose blocks in strict mode have ``strict``."""
        return replace(strict, mode=self.mode, profile={} if self.shares_across_profiles else strict.profile)


STRICT: Final = NumericsPolicy(
    STRICT_MODE, max_forward_blocks=1, publishes_decoded_kv=False, shares_across_profiles=False
)


def numerics_policy(mode: str, *, device_type: str, block_size: int) -> NumericsPolicy:
    """The policy of ``mode``, "strict" or "fast", on a device of type "cpu" or "cuda"."""
    if mode == STRICT_MODE:
        return STRICT
    assert mode == FAST_MODE, f"the settings let mode {mode!r} through"
    num_blocks = max(FAST_PREFILL_TOKENS[device_type] // block_size, 1)
    return NumericsPolicy(mode, num_blocks, publishes_decoded_kv=True, shares_across_profiles=True)

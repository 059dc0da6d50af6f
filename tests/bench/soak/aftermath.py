"""What is left when the load is over: answers to compare, and a worker that should be as it was."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prefixcache.client import AsyncClient
from prefixcache.client.options import GenerateOptions
from tests.bench.soak.target import Kept

ALONE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Answers under load against the same alone; ``num_hits`` of them had taken blocks from the cache."""

    num_compared: int
    num_hits: int
    num_different: int
    first_difference: str = ""


async def compare_alone(client: AsyncClient, kept: Sequence[Kept]) -> Comparison:
    """Ask for each kept answer again, one at a time and past the cache, on a worker that does nothing else."""
    differences: list[str] = []
    for answer in kept:
        request = answer.request
        options = request.options | GenerateOptions(bypass_prefix_cache=True, priority=0, timeout=ALONE_S)
        alone = await client.generate(request.prompt, **options)
        if alone.token_ids != answer.token_ids:
            differences.append(f"{answer.token_ids} under load, {alone.token_ids} alone, to {request.prompt!r:.200}")
    num_hits = sum(answer.cached_prompt_tokens > 0 for answer in kept)
    return Comparison(len(kept), num_hits, len(differences), differences[0] if differences else "")

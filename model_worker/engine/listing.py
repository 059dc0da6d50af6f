"""Pages of cached prefixes; a page's token is the place in the order of use where the page before it ended."""

import re
from typing import Final

from model_worker.engine.statistics import CachedPrefix, PrefixPage
from prefixcache.cache import BlockCache, PrefixPlace, place_of
from prefixcache.core.types import Prefix
from prefixcache.errors import InvalidRequest

_TOKEN: Final = re.compile(r"([0-9]{1,19})\.([0-9]{1,19})")


def list_page(cache: BlockCache, *, page_size: int, page_token: str) -> PrefixPage:
    """At most ``page_size`` prefixes that follow ``page_token``; raises InvalidRequest for one that no page gave."""
    after = _place(page_token) if page_token else None
    found = cache.prefixes(page_size + 1, after=after)
    page, has_more = found[:page_size], len(found) > page_size
    stats = cache.stats()
    return PrefixPage(
        [_described(prefix, stats.block_size, stats.block_bytes) for prefix in page],
        _token(place_of(page[-1])) if has_more else "",
    )


def _described(prefix: Prefix, block_size: int, block_bytes: int) -> CachedPrefix:
    return CachedPrefix(
        num_tokens=prefix.num_blocks * block_size,
        own_bytes=prefix.num_own_blocks * block_bytes,
        hits=prefix.num_hits,
        is_held=prefix.is_held,
        is_leaf=prefix.is_leaf,
    )


def _token(place: PrefixPlace) -> str:
    return f"{-place[0]}.{place[1]}"


def _place(token: str) -> PrefixPlace:
    parts = _TOKEN.fullmatch(token)
    if parts is None:
        raise InvalidRequest(f"page_token is {token[:60]!r}; send next_page_token of another page, or leave it out")
    return -int(parts[1]), int(parts[2])

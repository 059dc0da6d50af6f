"""The tiers below L1 as the settings have them, opened on the event loop that will use them."""

import time
from collections.abc import Callable

from model_worker.config import TierSettings
from prefixcache.errors import ConfigError
from prefixcache.storage.lower_tier import LowerTier, TierOptions
from prefixcache.storage.tier import Tier
from prefixcache.storage.tiered import TieredStore


async def open_store(settings: TierSettings, *, clock: Callable[[], float] = time.monotonic) -> TieredStore:
    """Open the tiers, the disk above Redis.

    A store that does not answer yet is no error; it is asked again. Raises ConfigError for a folder or an
    address that cannot be used, and where the packages of a tier are not installed.
    """
    tiers: list[Tier] = []
    try:
        if settings.disk is not None:
            tiers.append(await _open_disk(settings))
        if settings.redis is not None:
            tiers.append(_open_redis(settings))
    except BaseException:
        for tier in tiers:
            await tier.close()
        raise
    options = TierOptions(ttl_s=settings.ttl_s, max_pending_bytes=settings.write_queue_bytes)
    return TieredStore([LowerTier(tier, options, clock=clock) for tier in tiers], policy=settings.write_policy)


async def _open_disk(settings: TierSettings) -> Tier:
    assert settings.disk is not None
    try:
        from prefixcache.storage.disk import DiskOptions, DiskTier
    except ImportError as error:
        raise _missing("disk", error) from error
    options = DiskOptions(settings.disk_bytes, deadline_s=settings.disk_deadline_s)
    return await DiskTier.open(settings.disk, options)


def _open_redis(settings: TierSettings) -> Tier:
    assert settings.redis is not None
    try:
        from prefixcache.storage.remote import RemoteTier
    except ImportError as error:
        raise _missing("redis", error) from error
    return RemoteTier(settings.redis)


def _missing(extra: str, error: ImportError) -> ConfigError:
    package = (error.name or "").partition(".")[0]
    return ConfigError(
        f"the {extra} tier needs the package {package!r}, which is not installed; "
        f"run: pip install 'prefixcache[{extra}]'"
    )

"""The pure heart of the cache: identity, block hashes, the radix index and its eviction order.

Standard library and xxhash only: no clock, no input or output, no logging. The
structures here are not thread-safe; ``prefixcache.cache`` owns them on one loop.
"""

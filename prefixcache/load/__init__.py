"""The load generator: datasets, arrivals, a runner that does not lie about time, and what it measured.

Pure but for ``worker_target`` and ``plain_target``, which send requests; the clock and
the random numbers are passed in. ``prefixcache.cli.bench`` puts the parts together.
"""

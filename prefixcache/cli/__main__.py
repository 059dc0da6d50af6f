"""``python -m prefixcache.cli``: the same as the ``prefixcache`` command."""

from prefixcache.cli import main

if __name__ == "__main__":
    main()

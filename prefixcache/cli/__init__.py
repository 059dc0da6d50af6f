"""The ``prefixcache`` command: one verb a file, joined in ``app``."""

import os


def main() -> None:
    """Run the command line of this process and exit with its code."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from prefixcache.cli.app import app

    app(prog_name="prefixcache")

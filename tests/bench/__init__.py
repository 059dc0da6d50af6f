"""The benchmarks, each a module to run with ``python -m``."""

import model_worker  # noqa: F401 -- before torch: it bounds the spinning of torch's threads, as in a worker's process

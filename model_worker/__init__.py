"""The process that runs the model.

Importing this package before torch sets how long OpenMP threads spin at a barrier:
with the default, a second busy process on the same cores makes a decode step thirty
times slower (the spinning thread takes the core its partner waits for).
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Read when the libraries are imported, by whichever module imports them first.
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

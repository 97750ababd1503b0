"""What every test shares."""

import os

# No test may reach the network; the hub library reads this when it is imported, also in subprocesses.
os.environ["HF_HUB_OFFLINE"] = "1"
# The models are tiny: a second BLAS thread gains nothing, and on a busy machine its spinning costs minutes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

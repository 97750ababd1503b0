"""What every test shares."""

import os

# No test may reach the network; the hub library reads this when it is imported, also in subprocesses.
os.environ["HF_HUB_OFFLINE"] = "1"

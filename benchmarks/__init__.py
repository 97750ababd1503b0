"""What minigen costs; each module is a script with a help text."""

import minigen  # noqa: F401  before NumPy, for its setting of OpenBLAS

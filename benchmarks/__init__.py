"""How fast minigen is; each module is a script with a help text. README.md says what each of them shows."""

import minigen  # noqa: F401  before NumPy, because it sets an option of OpenBLAS

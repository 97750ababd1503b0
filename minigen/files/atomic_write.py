"""Writing a file such that, whatever happens, the old one or the new one is there, whole."""

import contextlib
import os
import secrets
from pathlib import Path


def beside(path):
    """(where `path` really lies, a name in that folder that no other run has): a link stays one, to what is new."""
    path = Path(os.path.realpath(path))
    return path, path.with_name(f".{secrets.token_hex(8)}.tmp")


def write_atomic(path, data):
    """Write bytes beside the file's place, then move them there. Raises OSError where it cannot be written."""
    path, temporary = beside(path)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # or a crash soon afterwards could leave the new name without its bytes
        if path.exists():
            temporary.chmod(path.stat().st_mode)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # after os.replace it is not there any more
            temporary.unlink()

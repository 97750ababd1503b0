"""Atomic file writes."""

import contextlib
import os
import secrets
from pathlib import Path


def beside(path):
    """(`path` with links resolved, so that a link is kept; the path of a temporary file in the same folder)."""
    path = Path(os.path.realpath(path))
    return path, path.with_name(f".{secrets.token_hex(8)}.tmp")


def write_atomic(path, data):
    """Write bytes to a temporary file, then rename it to `path`. Raises OSError if it cannot be written."""
    path, temporary = beside(path)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # without it, a crash soon afterwards could leave an empty file
        if path.exists():
            temporary.chmod(path.stat().st_mode)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # after os.replace it no longer exists
            temporary.unlink()

"""What has been written outlives a power cut."""

import os
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk: a rename alone may outlive what it names.

    Raises:
        OSError: it is not there, or the disk does not take it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

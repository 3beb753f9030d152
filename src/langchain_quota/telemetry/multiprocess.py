"""Several workers on one port: the directory in which they meet."""

import os
import shutil
from pathlib import Path

from prometheus_client import values

FILE = "langchain_quota.sqlite3"
"""What they know of threads and other subjects; prometheus_client takes only `*.db` for its own."""

_MIB = 2**20
NEEDED = 4 * _MIB
"""The room, in bytes, without which no worker begins.

Of prometheus_client's files there is one for each type of metric that we have (counter, histogram,
gauges of two modes). Each begins with up to a MiB, and takes that from the disk bit by bit.
"""


def multiprocess_directory() -> Path | None:
    """Where workers meet; `None` unless prometheus_client is in multi-process mode."""
    # It decides when it is imported, whatever the environment says now.
    if not values.ValueClass._multiprocess:  # noqa: SLF001 - it has no public name for it
        return None
    names = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
    return next((Path(os.environ[name]) for name in names if name in os.environ), None)


def unusable(directory: Path, purpose: str) -> ValueError:
    """The error of a directory that cannot be read, or written to."""
    return ValueError(
        f"PROMETHEUS_MULTIPROC_DIR={str(directory)!r} is no directory that this process can "
        f"{purpose}: make it before the workers start, or unset the variable where there is one "
        "worker only"
    )


def checked_directory() -> Path | None:
    """Where this process tells the others what it counts; `None` if there are none.

    Raises:
        ValueError: The directory is not there, or cannot be written to, or its disk is all but
            full.
    """  # noqa: DOC501 - the name is that of the function which makes the ValueError
    directory = multiprocess_directory()
    if directory is None:
        return None
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise unusable(directory, "write to")
    disk = shutil.disk_usage(directory)
    if disk.total and disk.free < NEEDED:
        free = disk.free * 10 // _MIB / 10  # rounded down, or it could look like enough
        raise ValueError(
            f"PROMETHEUS_MULTIPROC_DIR={str(directory)!r} is on a disk with "
            f"{free:.1f} MiB free, and a worker begins with {NEEDED / _MIB:.1f} MiB "
            "there. On a full disk prometheus_client ends the process (SIGBUS): make room, or name "
            "a directory on another disk"
        )
    return directory

"""The directory that several processes share if they answer on one port."""

import os
import shutil
from pathlib import Path

from prometheus_client import values

_MIB = 2**20
_NEEDED = 4 * _MIB
"""The free space, in bytes, that a worker needs to begin.

prometheus_client has one file for each of our types of metrics (counter, histogram, gauges of two
modes). Each file begins with up to a MiB, and takes that from the disk step by step.
"""


def multiprocess_directory() -> Path | None:
    """The directory that workers share; `None` unless prometheus_client has multi-process mode."""
    # It chooses its mode when it is imported; the environment may have changed since.
    if not values.ValueClass._multiprocess:  # noqa: SLF001 - it has no public name for it
        return None
    names = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
    return next((Path(os.environ[name]) for name in names if name in os.environ), None)


def unusable(directory: Path, purpose: str) -> ValueError:
    """The error for a directory that cannot be read, or written to."""
    return ValueError(
        f"PROMETHEUS_MULTIPROC_DIR={str(directory)!r} is no directory that this process can "
        f"{purpose}: make it before the workers start, or unset the variable where there is one "
        "worker only"
    )


def checked_directory() -> Path | None:
    """The directory in which this process shares its counts; `None` without multi-process mode."""
    directory = multiprocess_directory()
    if directory is None:
        return None
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise unusable(directory, "write to")
    disk = shutil.disk_usage(directory)
    if disk.total and disk.free < _NEEDED:
        free = disk.free * 10 // _MIB / 10  # rounded down, or it could look like enough
        raise ValueError(
            f"PROMETHEUS_MULTIPROC_DIR={str(directory)!r} is on a disk with "
            f"{free:.1f} MiB free, and a worker begins with {_NEEDED / _MIB:.1f} MiB "
            "there. On a full disk prometheus_client ends the process (SIGBUS): make room, or name "
            "a directory on another disk"
        )
    return directory

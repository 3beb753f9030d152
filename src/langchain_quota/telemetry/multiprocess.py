"""Several workers on one port: each writes its tables to a directory, and a scrape merges all.

A worker holds a lock on a file of its own for as long as its process lives. The operating system
lets go of it however the process ends, so that neither a kill nor a process id that is used again
makes a dead worker look alive, and workers need not see each other's process ids.
"""

import atexit
import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from threading import Event, Thread
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Metric, values
from prometheus_client.registry import Collector

from langchain_quota.locks import fork_safe_lock
from langchain_quota.telemetry.merging import OnError, Tables, merge, read_tables, write_tables
from langchain_quota.telemetry.subjects import SubjectTable
from langchain_quota.telemetry.threads import ThreadTable, families

if sys.platform == "win32":

    def _lock(file: int) -> None:
        """Nothing: there only a worker that ends by itself is known to be dead."""

    def _is_locked(_file: int) -> bool:
        return True

else:
    import fcntl

    def _lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _is_locked(file: int) -> bool:
        try:
            # Shared, so that scrapes do not take each other for the worker.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


INTERVAL = 1.0
"""How long, in seconds, a worker waits at least between two times that it writes."""

_REST = 9
"""How many times longer than it wrote a worker waits at least: it writes a tenth of the time."""

_MIB = 2**20
NEEDED = 4 * _MIB
"""The room, in bytes, without which no worker begins.

Of prometheus_client's files there is one for each type of metric that we have (counter, histogram,
gauges of two modes). Each begins with up to a MiB, and takes that from the disk bit by bit.
"""

PREFIX = "langchain_quota_"
TABLES = ".tables"
LOCK = ".lock"
_UNFINISHED = ".tmp"

logger = logging.getLogger("langchain_quota")


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


def check_directory() -> None:
    """Check that this process can tell the others what it counts, if it is to.

    Raises:
        ValueError: The directory is not there, or cannot be written to, or its disk is all but
            full.
    """  # noqa: DOC501 - the name is that of the function which makes the ValueError
    directory = multiprocess_directory()
    if directory is None:
        return
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


def share_tables(
    registry: CollectorRegistry, threads: ThreadTable, subjects: SubjectTable, on_error: OnError
) -> None:
    """Tell other workers of the tables of a registry, if prometheus_client is in that mode."""
    directory = multiprocess_directory()
    if directory is not None:
        _workers[registry] = Worker(directory, threads, subjects, on_error)
        _watch_process()


def worker_of(registry: CollectorRegistry) -> "Worker | None":
    """What tells other workers of the tables of a registry."""
    return _workers.get(registry)


class Worker:
    """What one process tells the others of the tables of one registry.

    Args:
        directory: Where they meet.
        threads: The table of threads.
        subjects: The table of subjects.
        on_error: Told of what could not be written, read or merged.
    """

    def __init__(
        self, directory: Path, threads: ThreadTable, subjects: SubjectTable, on_error: OnError
    ) -> None:
        self._directory = directory
        self._threads = threads
        self._subjects = subjects
        self._on_error = on_error
        self._begin()
        threads.listen(self._changed)
        subjects.listen(self._changed)

    def _begin(self) -> None:
        # No process that will ever live has the same.
        self._path = self._directory / f"{PREFIX}{os.getpid()}_{secrets.token_hex(8)}"
        self._news = Event()
        self._starting = fork_safe_lock()
        self._thread: Thread | None = None
        self._writing = fork_safe_lock()
        self._held: int | None = None
        self._closed = False

    def begin_anew(self) -> None:
        """In a process that was forked: what its parent knows, its parent tells."""
        if self._held is not None:
            # The parent has it open still, and with it the lock.
            os.close(self._held)
        self._threads.clear()
        self._subjects.clear()
        self._begin()

    def flush(self) -> None:
        """Write the tables now."""
        with self._writing:
            if self._closed:
                return
            try:
                self._write()
            except Exception as error:  # noqa: BLE001 - a full disk, a directory that is gone
                # It is still to be told.
                self._news.set()
                self._on_error(error)

    def close(self) -> None:
        """Take back what was told, and tell nothing any more."""
        with self._writing:
            self._closed = True
            self._news.set()
            if self._held is not None:
                os.close(self._held)
                self._held = None
                _remove(self._path)

    def collect(self) -> Iterator[Metric]:
        """Render what all workers know; if that fails, what this one does."""
        try:
            others = read_others(self._directory, self._on_error, own=self._path.name)
            own = Tables.of(self._threads, self._subjects)
            return merge([own, *others], time.time(), self._on_error)
        except Exception as error:  # noqa: BLE001 - whatever others told, the scrape goes on
            self._on_error(error)
            return self._threads.collect()

    def _changed(self) -> None:
        """Note that there is something to tell; it is written by another thread."""
        if not self._news.is_set():
            self._news.set()
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self._closed:
                    thread = Thread(target=self._run, name="langchain-quota-tables", daemon=True)
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        while self._news.wait() and not self._closed:
            # What comes from here on is news again.
            self._news.clear()
            began = time.monotonic()
            self.flush()
            time.sleep(max(INTERVAL, _REST * (time.monotonic() - began)))

    def _write(self) -> None:
        if self._held is None:
            self._held = _hold(self._path)
        unfinished = _beside(self._path, TABLES + _UNFINISHED)
        with open(unfinished, "wb", opener=_open_private) as file:
            tables = Tables.of(self._threads, self._subjects)
            write_tables(tables, file.write, self._on_error)
        unfinished.replace(_beside(self._path, TABLES))


_workers: WeakKeyDictionary[CollectorRegistry, Worker] = WeakKeyDictionary()


class WorkerTables(Collector):
    """The tables of all workers, merged when they are read.

    Args:
        registry: That of the telemetry whose tables are this process' own, now or later.
        directory: Where the workers meet.
    """

    def __init__(self, registry: CollectorRegistry, directory: Path) -> None:
        self._registry = registry
        self._directory = directory

    def describe(self) -> Iterator[Metric]:
        """The families without samples."""
        return iter(families().values())

    def collect(self) -> Iterator[Metric]:
        """Render what all workers know, as the settings of this one say, else of another."""
        worker = worker_of(self._registry)
        if worker is not None:
            return worker.collect()
        try:
            tables = read_others(self._directory, _log)
            return merge(tables, time.time(), _log) if tables else iter(())
        except Exception as error:  # noqa: BLE001 - whatever others told, the scrape goes on
            _log(error)
            return iter(())


def read_others(directory: Path, on_error: OnError, *, own: str = "") -> list[Tables]:
    """What live workers have told; what dead ones left is removed.

    Args:
        directory: Where they meet.
        on_error: Told of what cannot be read; it is left out.
        own: The name of a worker to leave out.
    """
    found = [*directory.glob(f"{PREFIX}*{TABLES}"), *directory.glob(f"{PREFIX}*{LOCK}")]
    tables = []
    for name in sorted({path.stem for path in found} - {own}):
        try:
            told = _read(directory / name)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one, the others are read
            on_error(error)
        else:
            tables += told
    return tables


def _read(worker: Path) -> list[Tables]:
    path = _beside(worker, TABLES)
    try:
        alive = _is_held(_beside(worker, LOCK))
    except FileNotFoundError:
        # It ended just now, or this is nothing of ours.
        if path.exists():
            raise
        return []
    if not alive:
        _remove(worker)
        return []
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        # It has written nothing yet, or ended just now.
        return []
    return [read_tables(data)]


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _remove(worker: Path) -> None:
    # The lock last: as long as it is there, what else is left is found.
    for suffix in (TABLES, TABLES + _UNFINISHED, LOCK):
        _beside(worker, suffix).unlink(missing_ok=True)


def _hold(worker: Path) -> int:
    """Make the file whose lock says that a worker is alive; it is never seen unlocked."""
    unfinished = _beside(worker, LOCK + _UNFINISHED)
    held = _open_private(str(unfinished), os.O_RDWR | os.O_CREAT)
    try:
        _lock(held)
        unfinished.replace(_beside(worker, LOCK))
    except BaseException:
        os.close(held)
        raise
    return held


def _is_held(path: Path) -> bool:
    probe = os.open(path, os.O_RDONLY)
    try:
        return _is_locked(probe)
    finally:
        os.close(probe)


def _open_private(path: str, flags: int) -> int:
    """Open a file that tells ids of threads."""
    return os.open(path, flags, 0o600)


def _log(error: Exception) -> None:
    """Tell of an error where no telemetry counts errors yet."""
    logger.error("tables of another worker cannot be read", exc_info=error)


@cache
def _watch_process() -> None:
    atexit.register(_end)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_begin_anew)


def _begin_anew() -> None:
    for worker in list(_workers.values()):
        worker.begin_anew()


def _end() -> None:
    for worker in list(_workers.values()):
        worker.close()

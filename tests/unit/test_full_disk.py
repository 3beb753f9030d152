"""A disk that is full where workers meet (`PROMETHEUS_MULTIPROC_DIR`): a small one."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import gettempdir
from textwrap import dedent
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from langchain_quota import Telemetry
from langchain_quota.telemetry import multiprocess

MIB = 2**20

# In a namespace of its own the test may mount a disk, which ends with it.
NAMESPACE = ("unshare", "--map-root-user", "--mount")
MOUNT = 'mount -t tmpfs -o "size=$1" tmpfs "$2" && shift 2 && exec "$@"'

FILL = """
import os
from pathlib import Path

DIRECTORY = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])

def fill():
    with (DIRECTORY / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return
"""


def can_mount() -> bool:
    if shutil.which(NAMESPACE[0]) is None:
        return False
    command = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", gettempdir()]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


needs_disk = pytest.mark.skipif(not can_mount(), reason="needs rights to mount a disk of its own")


def on_a_disk(size: int, directory: Path, program: str) -> "subprocess.CompletedProcess[str]":
    """Run a program whose workers would meet on a disk of so many bytes."""
    environment = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PROMETHEUS_MULTIPROC_DIR": str(directory),
    }
    disk = ("sh", "-c", MOUNT, "sh", str(size), str(directory))
    return subprocess.run(
        [*NAMESPACE, *disk, sys.executable, "-c", FILL + dedent(program)],
        env=os.environ | environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


@needs_disk
def test_prometheus_client_alone_does_not_survive(tmp_path: Path) -> None:
    """Without langchain-quota a new series on a full disk kills the process: it writes to memory.

    Where this fails, prometheus_client survives, and the documents say too little of it.
    """
    done = on_a_disk(
        MIB,
        tmp_path,
        """
        from prometheus_client import Counter
        calls = Counter("calls", "Calls.", ["name"])
        calls.labels("0").inc()
        fill()
        for number in range(10_000):
            calls.labels(str(number)).inc()
        """,
    )
    assert done.returncode == -signal.SIGBUS, done.stderr


@needs_disk
def test_no_worker_starts_without_room(tmp_path: Path) -> None:
    """Where there is less room than a worker's first files take, no telemetry is made."""
    done = on_a_disk(
        multiprocess.NEEDED + MIB,
        tmp_path,
        """
        from langchain_quota import ModelCallLimit, QuotaMiddleware
        (DIRECTORY / "other").write_bytes(bytes(2**20 + 4096))
        try:
            QuotaMiddleware([ModelCallLimit(run_limit=1)])
        except ValueError as error:
            print(error)
        (DIRECTORY / "other").unlink()
        QuotaMiddleware([ModelCallLimit(run_limit=1)])
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    [line] = done.stdout.splitlines()
    assert line.startswith(f"PROMETHEUS_MULTIPROC_DIR={str(tmp_path)!r} is on a disk with 3.9 MiB ")


@needs_disk
def test_a_table_that_cannot_be_written(tmp_path: Path) -> None:
    """A worker that cannot write what is used counts that, judges on, and writes it when it can."""
    done = on_a_disk(
        2 * multiprocess.NEEDED,
        tmp_path,
        """
        from prometheus_client import REGISTRY
        from langchain_quota import Call, Decision, Outcome
        from langchain_quota.telemetry import recorder_of
        from langchain_quota.telemetry.instruments import usage_of

        def failures():
            labels = {"component": "threads", "error_type": "OSError"}
            return REGISTRY.get_sample_value("langchain_quota_errors_total", labels)

        recorder = recorder_of(None)

        def judge():
            call = Call("model", thread_id="t1")
            recorder.record([Decision(call, Outcome.ALLOWED)], started=0)

        judge()
        # To begin a series on a full disk is what prometheus_client does not survive.
        recorder._metrics.failed("threads", "OSError")
        usage = usage_of(REGISTRY)
        usage.write()
        fill()
        judge()
        usage.write()
        assert failures() == 2
        (DIRECTORY / "filler").unlink()
        known = failures()
        judge()
        usage.write()
        assert failures() == known
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "threads of langchain-quota failed with OSError" in done.stderr


class Usage(NamedTuple):
    """What `shutil.disk_usage` gives."""

    total: int
    used: int
    free: int


def test_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the directory, what is free, what is needed and the remedy."""
    monkeypatch.setattr(multiprocess, "multiprocess_directory", lambda: tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10 * MIB, 9 * MIB, MIB))
    with pytest.raises(ValueError, match="PROMETHEUS_MULTIPROC_DIR") as caught:
        Telemetry(registry=CollectorRegistry())
    assert str(caught.value) == (
        f"PROMETHEUS_MULTIPROC_DIR={str(tmp_path)!r} is on a disk with 1.0 MiB free, and a worker "
        "begins with 4.0 MiB there. On a full disk prometheus_client ends the process (SIGBUS): "
        "make room, or name a directory on another disk"
    )


def test_a_disk_that_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows no sizes says 0 of 0 is free: that is no reason to refuse."""
    monkeypatch.setattr(multiprocess, "multiprocess_directory", lambda: tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 0))
    multiprocess.checked_directory()

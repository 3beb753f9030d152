"""A disk that is full where workers meet (`PROMETHEUS_MULTIPROC_DIR`): a small one."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from langchain_quota import Telemetry
from langchain_quota.telemetry import multiprocess

MIB = 2**20


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

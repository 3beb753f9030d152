"""The demo as a process of its own that goes on serving its metrics after its traffic."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from langchain_quota.exposition import ADDR_VARIABLE
from tests.forked import COMMAND_LINE, Program, start_python
from tests.servers.prometheus import eventually

_ADDRESS = re.compile(r"http://(127\.0\.0\.1:\d+)/metrics")
_END = re.compile(r"^Serving http://", re.MULTILINE)


class Demo:
    """A demo that runs.

    Args:
        process: The process.
        log: What it writes.
    """

    def __init__(self, process: Program, log: Path) -> None:
        self._process = process
        self._log = log
        self.address = self._says(_ADDRESS).group(1)

    def wait_for_end_of_traffic(self) -> None:
        """Wait until it only serves."""
        self._says(_END)

    def check(self) -> None:
        """Assert that it still runs."""
        assert self._process.poll() is None, self._log.read_text()

    def _says(self, pattern: re.Pattern[str]) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            self.check()
            return pattern.search(self._log.read_text())

        return eventually(found)


@contextmanager
def running_demo(log: Path, *, threads: int, seconds: int = 5) -> Iterator[Demo]:
    """Run the demo on a free port."""
    # No collector and no address from outside.
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("OTEL_") and key != ADDR_VARIABLE
    }
    with (
        log.open("wb") as file,
        start_python(
            COMMAND_LINE,
            *("demo", "--threads", str(threads), "--seconds", str(seconds)),
            *("--port", "0", "--serve"),
            stdout=file.fileno(),
            stderr=file.fileno(),
            env={**environment, "PYTHONUNBUFFERED": "1"},
        ) as process,
    ):
        yield Demo(process, log)
        process.terminate()
        process.wait()

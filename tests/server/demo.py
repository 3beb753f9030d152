"""The demo as a process of its own that goes on serving its metrics after its traffic."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.forked import COMMAND_LINE, Program, start_python
from tests.server.prometheus import said


class Demo:
    """A demo that runs, and the file that it writes to."""

    def __init__(self, process: Program, log: Path) -> None:
        self._process, self._log = process, log
        self.address = said(process, log, r"http://(127\.0\.0\.1:\d+)/\n")[1]

    @property
    def output(self) -> str:
        """What it has written."""
        return self._log.read_text()

    def wait_for_end_of_traffic(self) -> None:
        """Wait until it only serves."""
        said(self._process, self._log, "(?m)^Serving http://")

    def check(self) -> None:
        """Assert that it still runs."""
        assert self._process.poll() is None, self.output


@contextmanager
def running_demo(log: Path, *arguments: str, threads: int, seconds: int = 5) -> Iterator[Demo]:
    """Run the demo on a free port."""
    # No collector and no address from outside.
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("OTEL_") and key != "LANGCHAIN_QUOTA_METRICS_ADDR"
    }
    with (
        log.open("wb") as file,
        start_python(
            COMMAND_LINE,
            *("demo", "--threads", str(threads), "--seconds", str(seconds)),
            *("--port", "0", "--serve", *arguments),
            stdout=file.fileno(),
            stderr=file.fileno(),
            env={**environment, "COLUMNS": "80", "PYTHONUNBUFFERED": "1"},
        ) as process,
    ):
        yield Demo(process, log)
        process.terminate()
        process.wait()

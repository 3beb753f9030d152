"""Copies of the project in which faults are planted and tests run."""

import os
import re
import shutil
import sys
from multiprocessing import get_context
from pathlib import Path
from queue import Queue
from signal import SIGKILL

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/langchain_quota")
FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+)", re.MULTILINE)
OF_A_TEST = 60
"""After so many seconds a test has failed: a fault may make an agent go round in circles."""
_OF_A_FAULT = 1800
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "dist", "site"
)
_SLOW_IMPORTS = ["langsmith.pytest_plugin", "langchain.agents", "langgraph.graph", "hypothesis"]
_OPTIONS = ["-q", "-n0", "--tb=no", "-p", "no:cacheprovider", f"--timeout={OF_A_TEST}"]


class Copies:
    """Copies of the project; each has one fault at a time, and runs tests that may find it.

    The tests run in forks of a process that has imported what takes seconds.
    """

    def __init__(self, directory: str, number: int) -> None:
        self._forks = get_context("forkserver")
        self._forks.set_forkserver_preload(_SLOW_IMPORTS)
        self._free: Queue[Path] = Queue()
        for index in range(number):
            copy = Path(directory, str(index))
            # With the compiled modules, which stay valid.
            shutil.copytree(ROOT, copy, ignore=_LEFT_OUT)
            self._free.put(copy)

    def run(self, file: Path, text: bytes, *arguments: str) -> tuple[int | None, str]:
        """Run pytest in a copy that has the file with this text; its status and what it prints."""
        copy = self._free.get()
        try:
            (copy / file).write_bytes(text)
            process = self._forks.Process(target=_run_pytest, args=(copy, [*_OPTIONS, *arguments]))
            process.start()
            process.join(_OF_A_FAULT)
            if (status := process.exitcode) is None and process.pid is not None:
                os.killpg(process.pid, SIGKILL)
            return status, (copy / "pytest.log").read_text(encoding="utf-8")
        finally:
            shutil.copy2(ROOT / file, copy / file)
            self._free.put(copy)


def _run_pytest(copy: Path, arguments: list[str]) -> None:
    import pytest  # noqa: PLC0415 - in the forks only

    os.setsid()
    os.chdir(copy)
    with Path("pytest.log").open("w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:0] = [str(copy), str(copy / "src")]
    # The assertions of what is imported already cannot be rewritten, and need not be.
    sys.exit(pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]))

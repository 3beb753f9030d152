"""`make instructions`: count the machine instructions of key paths, and compare them with a commit.

Instructions do not depend on the load of the machine, as times do. A path may take 2 % more than at
the commit.
"""

import argparse
import asyncio
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory

from benchmarks import scenes
from benchmarks.checked import request, unreached, verdict
from langchain_quota import MemoryStore
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.runtime.sync_async import run_sync
from langchain_quota.telemetry import recorder_of

ROOT = Path(__file__).parents[1]
MOST = 1.02
"""The highest ratio of a path's instructions to those at the other commit."""

SETUPS = (
    *("drop-in, tool", "drop-in, model", "Inline, 2"),
    *("QuotaMiddleware, tool", "QuotaMiddleware, model", "QuotaMiddleware, 2"),
    *("QuotaMiddleware, 8", "QuotaMiddleware, 8 and tokens", *scenes.STORED),
)

Repeat = Callable[[int], None]
"""Does something so many times."""


def _steps(setup: str) -> Repeat:
    agent, threads = scenes.agent(setup), count()

    def repeat(number: int) -> None:
        asyncio.run(scenes.run(agent, number, f"thread-{next(threads)}"))

    # The series of a tool are made when it is first called; that is no part of a step.
    repeat(len(scenes.TOOLS))
    return repeat


def _decisions() -> Repeat:
    recorder, verdicts, tasks = recorder_of(scenes.telemetry()), [verdict(unreached(1))], count()

    def repeat(number: int) -> None:
        for _ in range(number):
            recorder.record(verdicts, started=time.time_ns(), task_id=f"task-{next(tasks)}")

    return repeat


def _answers() -> Repeat:
    client, asked = StoreClient(MemoryStore(), recorder_of(scenes.telemetry())), request()

    def repeat(number: int) -> None:
        for _ in range(number):
            # Each request has a name of its own.
            sent = asked._replace(name=token_hex(16)).request()
            result = run_sync(client.acquire("", sent))
            assert result is not None
            asked.by_store(sent, result).decide()

    return repeat


PATHS: dict[str, tuple[Callable[[], Repeat], int, int]] = {
    **{f"step: {setup}": (partial(_steps, setup), 4, 24) for setup in SETUPS},
    # They are repeated more often: what a process does once would show in their numbers.
    "telemetry of a decision": (_decisions, 40, 440),
    "a store's answer": (_answers, 40, 440),
}
"""What is counted, by name: what prepares it, and how often it is repeated, few times and many."""


def main() -> int:
    """Count, and compare if a commit is named.

    Raises:
        SystemExit: valgrind is missing.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    parser.add_argument("--against", metavar="COMMIT", help="compare with the merge base of this")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--repeat", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.repeat:
        _repeat_all()
        return 0
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is missing: on Debian and Ubuntu, apt-get install valgrind")
    counts = _counts()
    if arguments.json:
        print(json.dumps(counts))  # noqa: T201 - a command: it prints
        return 0
    before = _counts_at(arguments.against) if arguments.against else {}
    failed = False
    for name, number in counts.items():
        ratio = number / before.get(name, number)
        failed |= ratio > MOST
        change = f"{ratio - 1:+8.1%}" if name in before else ""
        print(f"{name:36}{number:12,}{change}{'  too many' if ratio > MOST else ''}")  # noqa: T201 - the same
    return int(failed)


def _counts() -> dict[str, int]:
    """Return the instructions of each path: those of many, less those of few."""
    with TemporaryDirectory(prefix="benchmark-") as directory:
        done = subprocess.run(
            [
                *("valgrind", "--tool=callgrind", "--quiet"),
                f"--callgrind-out-file={directory}/%p.callgrind",
                *(sys.executable, "-m", "benchmarks.instructions", "--repeat"),
            ],
            cwd=ROOT,
            # Sets and dicts in the same order each time.
            env={**os.environ, "PYTHONHASHSEED": "0"},
            check=True,
            stdout=subprocess.PIPE,
            timeout=900,
        )
        totals = {}
        for line in done.stdout.splitlines():
            name, number, process = json.loads(line)
            text = Path(directory, f"{process}.callgrind").read_text()
            [total] = re.findall(r"^totals: (\d+)$", text, re.MULTILINE)
            totals[name, number] = int(total)
    return {
        name: round((totals[name, many] - totals[name, few]) / (many - few))
        for name, (_, few, many) in PATHS.items()
    }


def _repeat_all() -> None:
    """Repeat each path few times and many, in forked children, and print which did what.

    A child counts on from what its parent has counted, so the difference of two children that
    differ only in how often they repeat a path is what that costs.
    """
    # What is imported and cached on the first use.
    _steps("Inline, 2")(1)
    # The collector's runs come when they come; they would be counted with any path.
    gc.collect()
    gc.freeze()
    gc.disable()
    running = 0
    for name, (prepare, *times) in PATHS.items():
        for number in times:
            if running == (os.cpu_count() or 1):
                running -= _wait()
            child = os.fork()
            if child == 0:
                failed = 1
                try:
                    repeat = prepare()
                    repeat(1)
                    repeat(number)
                    failed = 0
                finally:
                    sys.stderr.flush()
                    os._exit(failed)
            print(json.dumps([name, number, child]), flush=True)  # noqa: T201 - to `_counts`
            running += 1
    for _ in range(running):
        _wait()


def _wait() -> int:
    child, status = os.wait()
    if status:
        raise RuntimeError(f"process {child} ended with {os.waitstatus_to_exitcode(status)}")
    return 1


def _counts_at(commit: str) -> dict[str, int]:
    """Return the numbers at the merge base of a commit and HEAD, counted by the code there."""
    base = _git("merge-base", commit, "HEAD")
    with TemporaryDirectory(prefix="benchmark-") as name:
        tree = Path(name) / "tree"
        _git("worktree", "add", "--detach", str(tree), base)
        try:
            if not (tree / "benchmarks" / "instructions.py").exists():
                return {}
            found = subprocess.run(
                [sys.executable, "-m", "benchmarks.instructions", "--json"],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree / "src")},
                check=True,
                capture_output=True,
                text=True,
            )
        finally:
            _git("worktree", "remove", "--force", str(tree))
    counts: dict[str, int] = json.loads(found.stdout)
    return counts


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

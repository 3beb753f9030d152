"""What one of something costs: in instructions, where callgrind is found, else in CPU time."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.workloads import Work, prepare

ROOT = Path(__file__).parents[1]
UNIT = "µs of CPU time"
"""What is taken where instructions are not counted."""

_TOTAL = re.compile(r"^totals: (\d+)$", re.MULTILINE)
_SECONDS = 900


@dataclass(frozen=True)
class Costs:
    """What one of each costs.

    Attributes:
        unit: What the numbers are.
        of: The numbers.
    """

    unit: str
    of: Mapping[Work, float]


def costs(works: Sequence[Work], times: tuple[int, int], *, counted: bool, rounds: int) -> Costs:
    """What one of each costs: the difference of few and many, for each that is more.

    Args:
        works: What is done.
        times: How often, few and many.
        counted: Whether instructions are counted, if they can be.
        rounds: How often each has its turn where time is taken.
    """
    if counted and shutil.which("valgrind"):
        return Costs("instructions", _instructions(works, times))
    return Costs(UNIT, cpu_time(works, times, rounds))


def cpu_time(works: Sequence[Work], times: tuple[int, int], rounds: int) -> dict[Work, float]:
    """The microseconds that one of each takes, taken in turns."""
    few, many = times
    prepared = {work: prepare(work) for work in works}
    taken: dict[Work, list[float]] = {work: [] for work in works}
    for _ in range(rounds):
        for work, repeated in prepared.items():
            started = time.process_time_ns()
            repeated(few)
            between = time.process_time_ns()
            repeated(many)
            ended = time.process_time_ns()
            more = (ended - between) - (between - started)
            taken[work].append(more / (many - few) / 1_000)
    return {work: median(each) for work, each in taken.items()}


def _instructions(works: Sequence[Work], times: tuple[int, int]) -> dict[Work, float]:
    few, many = times
    jobs = [(work, number) for work in works for number in times]
    with TemporaryDirectory(prefix="benchmark-") as name:
        directory = Path(name)
        described = [(type(work).__name__, astuple(work), number) for work, number in jobs]
        (directory / "jobs.json").write_text(json.dumps(described))
        subprocess.run(
            [
                *("valgrind", "--tool=callgrind", "--quiet"),
                f"--callgrind-out-file={directory / '%p.callgrind'}",
                *(sys.executable, "-m", "benchmarks.counted", str(directory)),
            ],
            cwd=ROOT,
            # Sets and dicts in the same order each time.
            env={**os.environ, "PYTHONHASHSEED": "0"},
            check=True,
            timeout=_SECONDS,
        )
        done = json.loads((directory / "done.json").read_text())
        counts = {
            jobs[index]: _counted(directory / f"{process}.callgrind")
            for process, index in done.items()
        }
    return {work: (counts[work, many] - counts[work, few]) / (many - few) for work in works}


def _counted(path: Path) -> int:
    found = _TOTAL.search(path.read_text())
    if found is None:
        raise RuntimeError(f"callgrind wrote no total to {path}")
    return int(found[1])

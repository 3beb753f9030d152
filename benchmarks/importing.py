"""What importing the package takes, where LangChain's agents are imported already."""

import os
import subprocess
import sys
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.costs import ROOT
from benchmarks.report import Ratio, Result, Table, number
from benchmarks.sizes import Size

MOST = 0.1
IMPORTS = {
    "LangChain's agents": "from langchain.agents import create_agent",
    "then `import langchain_quota`": "import langchain_quota",
    "then `QuotaMiddleware` and two limits": (
        "from langchain_quota import ModelCallLimit, QuotaMiddleware, ToolCallLimit"
    ),
}
_WRITES_NOTHING = "PYTHONDONTWRITEBYTECODE"
_TIMED = "started = time.process_time()\n{}\nprint(time.process_time() - started)\n"


def measure(size: Size) -> Result:
    """Measure."""
    program = "import time\n" + "".join(map(_TIMED.format, IMPORTS.values()))
    with TemporaryDirectory(prefix="benchmark-") as directory:
        # The first run compiles, and keeps the compiled files, as an installed package does.
        taken = [_run(program, directory) for _ in range(1 + size.scrapes)][1:]
    seconds = dict(zip(IMPORTS, map(median, zip(*taken, strict=True)), strict=True))
    rows = [[what, number(each, 3)] for what, each in seconds.items()]
    ours = sum(seconds.values()) - seconds["LangChain's agents"]
    ratio = Ratio("seconds to import ours, after LangChain's agents", MOST, ours)
    note = (
        "Seconds of CPU time, as the median. A new process makes these imports one after the "
        "other. Each row is what its import adds."
    )
    return Result([Table("Import", ("import", "seconds"), rows, note)], [ratio])


def _run(program: str, compiled: str) -> list[float]:
    kept = {name: value for name, value in os.environ.items() if name != _WRITES_NOTHING}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={
            **kept,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONPYCACHEPREFIX": compiled,
        },
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return [*map(float, done.stdout.split())]

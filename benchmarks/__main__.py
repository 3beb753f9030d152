"""`python -m benchmarks`: measure, print, and write docs/benchmarks.md."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import (
    budgets,
    concurrency,
    decisions,
    footprint,
    importing,
    per_step,
    redis_acquire,
    runs,
    scrape,
    workers,
)
from benchmarks.machine import machine, versions
from benchmarks.report import Result, Table, targets
from benchmarks.sizes import FULL, QUICK

BENCHMARKS = {
    "steps": per_step.measure,
    "budgets": budgets.measure,
    "runs": runs.measure,
    "concurrency": concurrency.measure,
    "decisions": decisions.measure,
    "scrape": scrape.measure,
    "workers": workers.measure,
    "redis": redis_acquire.measure,
    "memory": footprint.measure,
    "import": importing.measure,
}

DOCS = Path(__file__).parents[1] / "docs" / "benchmarks.md"

HEAD = """\
# Benchmarks

[What does it cost?](cost.md) has the three most important numbers. This page has all
measurements. The first table is for users. The [targets](#targets) are at the end, with those that
are not met.

"""

HOW = """\
## How it is measured

One program measures our limits and LangChain's limiters, by turns. `make bench` runs this program
and writes this page. It takes up to 15 minutes. Nothing else should run on the machine.
`make bench ARGS="--only steps"` measures one part. `make bench ARGS=--quick` tries all parts in
two minutes. These two do not write this page.

- Machine: {machine}
- Versions: {versions}
- **Instructions**: valgrind's callgrind counts them. If valgrind is not installed, the number is
  CPU time. The number is the difference between a run of many steps and a run of few steps,
  without Python's garbage collector. A second measurement differs by less than a percent. But
  instructions do not show time that is spent waiting for a disk or another thread.
- **Times by the clock** include such waits. A second measurement can differ a lot. Compare times
  only within one run of the program.
- *none* is an agent without limits. In all other rows, no call is over a limit.
- *LangChain, 2* has LangChain's `ModelCallLimitMiddleware` and `ToolCallLimitMiddleware`.
  *LangChain, 8* has both, and a `ToolCallLimitMiddleware` for each of six tools. *drop-in* has
  the classes of this package with the same names.
- *QuotaMiddleware* and *Inline* (`InlineQuotaMiddleware`) have the same limits as *LangChain*.
  *QuotaMiddleware, model* has one limit on model calls. *QuotaMiddleware, tool* and *Inline, 1*
  have one limit that counts all tools.
- *two hooks that only write* is a middleware without limits and telemetry. Its two hooks write the
  same keys of the state as *QuotaMiddleware*. *a wrap hook that only writes* does so for *Inline*.
  *two hooks that do nothing* writes nothing. What these three cost is the cost of LangChain and
  LangGraph.

"""


def main() -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small numbers, to try it")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, help="one part; repeatable")
    parser.add_argument("--to", type=Path, help="where to write the page")
    arguments = parser.parse_args()
    how = HOW.format(machine=machine(), versions=versions())
    results = []
    for name in arguments.only or BENCHMARKS:
        started = time.perf_counter()
        result = BENCHMARKS[name](QUICK if arguments.quick else FULL)
        results.append(result)
        print("\n".join(map(str, _shown(result))))  # noqa: T201 - a command: it prints
        took = time.perf_counter() - started
        print(f"({name}: {took:.0f} s)\n", file=sys.stderr)  # noqa: T201 - the same
    met = targets([ratio for result in results for ratio in result.ratios])
    print(met)  # noqa: T201 - the same
    to = arguments.to or (None if arguments.quick or arguments.only else DOCS)
    if to is not None:
        to.write_text(page(results, how))
        print(f"written: {to}", file=sys.stderr)  # noqa: T201 - the same
    return 0


def _shown(result: Result) -> list[Table]:
    return [*([] if result.overview is None else [result.overview]), *result.tables]


def page(results: Sequence[Result], how: str) -> str:
    """The page: first the table for users, then how it is measured, then all other tables."""
    first = [result.overview for result in results if result.overview is not None]
    rest = [table for result in results for table in result.tables]
    met = targets([ratio for result in results for ratio in result.ratios])
    return HEAD + "\n".join(map(str, [*first, how, *rest, met]))


if __name__ == "__main__":
    sys.exit(main())

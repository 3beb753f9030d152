"""`python -m benchmarks`: measure, print, and write docs/benchmarks.md."""

import argparse
import re
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

SHOWN = re.compile(
    r"A step(?: with budgets)?, in .+|Runs of ten steps|What a step stores: PostgreSQL|Scraping"
    r"|Acquiring in Redis"
)
"""The tables that the page has. The terminal has all."""

HEAD = """\
# Benchmarks

[Production](production.md#know-what-it-costs) has the three most important numbers. Here are those
behind them, and at the end the [targets](#targets), with those that are not met.

"""

HOW = """\
## How it is measured

`make bench` measures our limits and LangChain's, by turns, prints all tables, and writes this page.
It takes up to 15 minutes. Nothing else should run on the machine. `make bench ARGS=--quick` takes
two minutes, and `ARGS="--only steps"` measures one part. Both only print.

- Machine: {machine}
- Versions: {versions}
- **Instructions** are those that valgrind counts. A second measurement differs by less than a
  percent. They do not show waits for a disk or another thread.
- **Times by the clock** include waits. Compare them only within one run of the program.
- *none* is an agent without limits. In all other rows, no call is over a limit.
- *LangChain, 2* has LangChain's `ModelCallLimitMiddleware` and `ToolCallLimitMiddleware`.
  *LangChain, 8* also has one for each of six tools. *drop-in* has the classes of this package with
  the same names.
- *QuotaMiddleware* and *Inline* (`InlineQuotaMiddleware`) have the same limits. *QuotaMiddleware,
  model* limits only model calls. *QuotaMiddleware, tool* and *Inline, 1* limit all tools together.
- *hooks that only write*, or *do nothing*, limit nothing. They show what LangChain and LangGraph
  cost.

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
    """The page: first the table for users, then how it is measured, then what users ask next."""
    first = [result.overview for result in results if result.overview is not None]
    tables = [table for result in results for table in result.tables]
    rest = [table for table in tables if SHOWN.fullmatch(table.title)]
    met = targets([ratio for result in results for ratio in result.ratios])
    return HEAD + "\n".join(map(str, [*first, how, *rest, met]))


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks`: measure, print, and write benchmarks/report.md."""

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
    growth,
    importing,
    pace,
    per_step,
    postgres_acquire,
    redis_acquire,
    runs,
    scrape,
    traces,
    workers,
)
from benchmarks.machine import machine, versions
from benchmarks.report import NOTHING, Result, Table, targets
from benchmarks.sizes import FULL, QUICK

BENCHMARKS = {
    "steps": per_step.measure,
    "stores": per_step.measure_stores,
    "budgets": budgets.measure,
    "runs": runs.measure,
    "concurrency": concurrency.measure,
    "decisions": decisions.measure,
    "growth": growth.measure,
    "traces": traces.measure,
    "scrape": scrape.measure,
    "workers": workers.measure,
    "redis": redis_acquire.measure,
    "postgres": postgres_acquire.measure,
    "pace": pace.measure,
    "memory": footprint.measure,
    "import": importing.measure,
}

REPORT = Path(__file__).with_name("report.md")

HEAD = """\
# Benchmarks

The [documentation](../docs/benchmarks.md) summarizes the most important numbers. This report shows
the overhead of limits: what they add to a step of an agent, which is one model call and one tool
call. The model and the tools answer immediately.

"""

LEGEND = """\
- *CPU µs a step*: microseconds of CPU time of all threads, in runs of ten steps without a
  checkpointer: the first quartile of all rounds. *to LangChain* is this, divided by what
  LangChain's limiters add for these limits. *to LangChain and telemetry* is the same for those
  limiters with a span and a counter for each call, as a user would write them:
  `benchmarks/by_hand.py`.
- *its hooks alone*: the cost of hooks of the same kinds that check nothing and write the same keys.
- *ms* and *bytes a step*: elapsed time and stored bytes, with PostgreSQL as checkpointer.
- *LangChain, 2* is LangChain's `ModelCallLimitMiddleware` and `ToolCallLimitMiddleware`, and
  *LangChain, 8* adds one for each of six tools. *drop-in* uses this package's classes of the same
  names. *QuotaMiddleware* and *Inline* (`InlineQuotaMiddleware`) have the same limits.
  *QuotaMiddleware, model* limits only model calls; *QuotaMiddleware, tool* and *Inline, 1* limit
  all tools together.
- Telemetry is on, and the SDK creates all spans without sampling. The garbage collector is on.
  Where deepagents or langchain-quickjs is installed, QuotaMiddleware needs a hook around the model,
  which adds 20 to 50 µs a step.
"""

HOW = """\
`make bench` measures all set-ups in turn and writes this report. It also prints runs of 3 and 60
steps, instructions, other checkpointers, budgets, decisions, scrapes, workers, stores, memory and
imports, and which targets are met. Run nothing else on the machine for these 30 minutes.
`make bench ARGS="--quick --only steps"` tries one part.

Machine: {machine}

Versions: {versions}
"""


def main() -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small numbers, to try it")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, help="one part; repeatable")
    parser.add_argument("--to", type=Path, help="where to write the report")
    arguments = parser.parse_args()
    how = HOW.format(machine=machine(), versions=versions())
    results = []
    for name in arguments.only or BENCHMARKS:
        started = time.perf_counter()
        result = BENCHMARKS[name](QUICK if arguments.quick else FULL)
        results.append(result)
        print("\n".join(map(str, result.tables)))  # noqa: T201 - a command: it prints
        took = time.perf_counter() - started
        print(f"({name}: {took:.0f} s)\n", file=sys.stderr)  # noqa: T201 - the same
    met = targets([ratio for result in results for ratio in result.ratios])
    print(met)  # noqa: T201 - the same
    to = arguments.to or (None if arguments.quick or arguments.only else REPORT)
    if to is not None:
        to.write_text(page(results, how))
        print(f"written: {to}", file=sys.stderr)  # noqa: T201 - the same
    return 0


def page(results: Sequence[Result], how: str) -> str:
    """The page: its tables, and how they are measured."""
    found: dict[str, dict[str, str]] = {}
    for result in results:
        for setup, cells in result.of_page.items():
            found.setdefault(setup, {}).update(cells)
    columns = [*dict.fromkeys(column for cells in found.values() for column in cells)]
    rows = [
        [setup, *(cells.get(each, NOTHING) for each in columns)]
        for setup, cells in found.items()
        # Columns compare with the others.
        if " hook" not in setup and not setup.startswith("LangChain and telemetry")
    ]
    tables = [Table("What limits add to a step", ["limits", *columns], rows)]
    tables += [table for result in results for table in result.tables_of_page]
    first, *others = map(str, tables)
    return "\n".join([f"{HEAD}{first}", LEGEND, *others, how])


if __name__ == "__main__":
    sys.exit(main())

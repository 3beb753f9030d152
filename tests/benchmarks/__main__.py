"""`python -m tests.benchmarks`: measure, print, and write docs/benchmarks.md."""

import argparse
import sys
import time
from pathlib import Path

from tests.benchmarks import (
    budgets,
    concurrency,
    decisions,
    per_step,
    redis_acquire,
    runs,
    scrape,
)
from tests.benchmarks.machine import machine, versions
from tests.benchmarks.report import Result, targets
from tests.benchmarks.sizes import FULL, QUICK

BENCHMARKS = {
    "steps": per_step.measure,
    "budgets": budgets.measure,
    "runs": runs.measure,
    "concurrency": concurrency.measure,
    "decisions": decisions.measure,
    "scrape": scrape.measure,
    "redis": redis_acquire.measure,
}

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks.md"

HEAD = """\
# Benchmarks

[What does it cost?](cost.md) has the three most important numbers. This page has all
measurements.

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
- *QuotaMiddleware* and *Inline* (`InlineQuotaMiddleware`) have the same limits. If there is one
  limit, it counts all tools.
- The targets, and which of them are met, are [at the end](#targets).

"""


def main() -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small numbers, to try it")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, help="one part; repeatable")
    parser.add_argument("--to", type=Path, help="where to write the page")
    arguments = parser.parse_args()
    head = HEAD.format(machine=machine(), versions=versions())
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
    to = arguments.to or (None if arguments.quick or arguments.only else DOCS)
    if to is not None:
        to.write_text(head + _page(results))
        print(f"written: {to}", file=sys.stderr)  # noqa: T201 - the same
    return 0


def _page(results: list[Result]) -> str:
    met = targets([ratio for result in results for ratio in result.ratios])
    return "\n".join(map(str, [*(table for result in results for table in result.tables), met]))


if __name__ == "__main__":
    sys.exit(main())

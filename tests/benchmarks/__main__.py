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

What limits cost, beside LangChain's own limiters, measured in one run and in turns. Written by
`make bench`; `make bench ARGS="--only steps"` measures one part, `ARGS=--quick` tries all in two
minutes, and neither writes this page. The whole run takes up to a quarter of an hour; let nothing
else run meanwhile.

- Machine: {machine}
- Versions: {versions}
- Instructions are counted by callgrind, where valgrind is found (else CPU time is taken): the
  difference between a run of few steps and one of many, without Python's garbage collector. They
  repeat within a percent, but miss what waits for a disk or another thread. Times by the clock have
  that, and do not repeat: compare them within one run only.
- *none* is an agent without limits; *LangChain, 2* are LangChain's `ModelCallLimitMiddleware` and
  `ToolCallLimitMiddleware`, *8* those and a `ToolCallLimitMiddleware` for each of six tools;
  *drop-in* are ours of the same names; *QuotaMiddleware* and *Inline* (`InlineQuotaMiddleware`)
  hold the same limits. A single limit is on all tools together. Nothing is over its limit.
- What each ratio should be, and which are met, is [at the end](#targets).

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

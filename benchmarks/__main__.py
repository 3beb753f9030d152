"""`python -m benchmarks`: measure, print, and write benchmarks/report.md."""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from benchmarks import footprint, growth, pace, scrape, steps, stores, traces
from benchmarks.report import FULL, QUICK, Result, Size, targets

BENCHMARKS: dict[str, Callable[[Size], Result]] = {
    "steps": steps.measure,
    "spans": steps.measure_spans,
    "stores": steps.measure_stores,
    "growth": growth.measure,
    "traces": traces.measure,
    "pace": pace.measure,
    "scrape": scrape.measure,
    "requests": stores.measure,
    "memory": footprint.measure,
}

REPORT = Path(__file__).with_name("report.md")

PAGE = """\
# Benchmarks

The [documentation](../docs/benchmarks.md) summarizes the most important numbers. This report shows
the overhead of limits: what they add to a step of an agent, which is one model call and one tool
call. The model and the tools answer immediately.

{tables}
`make bench` measures all set-ups in turn and writes this report. It also prints scrapes, the
requests of stores, memory, and which targets are met; `make instructions` counts instructions. Run
nothing else on the machine for these ten minutes. `make bench ARGS="--quick --only steps"` tries
one part.

Machine: {processor}, {cores} cores, {system}; load at the start {load:.1f}

Versions: {python}, {versions}
"""

PACKAGES = (
    *("langchain-quota", "langchain", "langchain-core", "langgraph", "langgraph-checkpoint"),
    *("langgraph-checkpoint-postgres", "opentelemetry-sdk", "prometheus-client", "redis"),
)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small numbers, to try it")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, help="one part; repeatable")
    parser.add_argument("--to", type=Path, help="where to write the report")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    results = []
    for name in arguments.only or BENCHMARKS:
        started = time.perf_counter()
        result = BENCHMARKS[name](QUICK if arguments.quick else FULL)
        results.append(result)
        print(result.table or f"{name}: not measured")  # noqa: T201 - a command: it prints
        took = time.perf_counter() - started
        print(f"({name}: {took:.0f} s)\n", file=sys.stderr)  # noqa: T201 - the same
    print(targets([ratio for result in results for ratio in result.ratios]))  # noqa: T201 - the same
    to = arguments.to or (None if arguments.quick or arguments.only else REPORT)
    if to is not None:
        tables = [f"{result.table}" for result in results if result.table and result.is_of_page]
        page = PAGE.format(
            tables="\n".join(tables),
            processor=_processor(),
            cores=os.cpu_count(),
            system=platform.system(),
            load=load,
            python=f"{platform.python_implementation()} {platform.python_version()}",
            versions=", ".join(f"{package} {version(package)}" for package in PACKAGES),
        )
        to.write_text(page)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()

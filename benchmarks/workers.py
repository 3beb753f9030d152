"""Scraping several worker processes, beside one process with as many threads."""

import asyncio
import json
import os
import subprocess
import sys
import time
from statistics import median
from tempfile import TemporaryDirectory

from prometheus_client import CollectorRegistry

from benchmarks.costs import ROOT
from benchmarks.report import Ratio, Result, Table, number
from benchmarks.scrape import scraped, tracked
from benchmarks.sizes import Size
from langchain_quota import metrics_app

WORKERS = 4
_SECONDS = 300


def measure(size: Size) -> Result:
    """Measure."""
    each = size.worker_threads
    one: list[float] = []
    several: list[float] = []
    for _ in range(size.crowds):
        one += _child(0, each * WORKERS, size.scrapes)
        with TemporaryDirectory(prefix="benchmark-") as directory:
            for worker in range(WORKERS):
                _child(worker * each, each, 0, directory)
            several += _child(0, 0, size.scrapes, directory)
    rows = [
        [f"1 process, {each * WORKERS:,} threads", number(median(one), 1)],
        [f"{WORKERS} workers, {each:,} threads each", number(median(several), 1)],
    ]
    note = "The CPU time of a scrape, as the median. A thread is a conversation."
    ratio = Ratio(
        f"scrape of {WORKERS} workers with {each:,} threads each, to one process with all threads",
        1.5,
        median(several) / median(one),
    )
    return Result(
        [Table("Scraping several workers", ("processes", "milliseconds"), rows, note)], [ratio]
    )


def _child(first: int, threads: int, scrapes: int, directory: str | None = None) -> list[float]:
    """What scrapes take in a process that has checked calls of some threads."""
    settings = {} if directory is None else {"PROMETHEUS_MULTIPROC_DIR": directory}
    arguments = map(str, (first, threads, scrapes))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.workers", *arguments],
        cwd=ROOT,
        env={**os.environ, **settings},
        check=True,
        stdout=subprocess.PIPE,
        timeout=_SECONDS,
    )
    taken: list[float] = json.loads(done.stdout)
    return taken


async def _taken(registry: CollectorRegistry, scrapes: int) -> list[float]:
    app = metrics_app(registry)
    taken = []
    for turn in range(scrapes + 1):
        started = time.process_time()
        await scraped(app)
        # The first writes what waits to be written.
        if turn:
            taken.append((time.process_time() - started) * 1_000)
    return taken


def main(first: int, threads: int, scrapes: int) -> None:
    """Check a call of each thread, and scrape."""
    registry = tracked(threads, first=first) if threads else CollectorRegistry()
    taken = asyncio.run(_taken(registry, scrapes)) if scrapes else []
    print(json.dumps(taken))  # noqa: T201 - read by the process that started this one


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

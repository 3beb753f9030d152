"""Scraping the metrics of many threads, and how late the event loop is meanwhile."""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from statistics import median
from typing import Any

from prometheus_client import CollectorRegistry

from benchmarks.checked import verdict
from benchmarks.report import Ratio, Result, Size, Table, divided, number
from langchain_quota import Telemetry, ToolCallLimit, metrics_app, quota_app
from langchain_quota.middleware.resolver import fixed
from langchain_quota.telemetry import recorder_of

LIMIT, NEAR, FEW = 100, 90, 10
_TICK = 0.001


def used(thread: int) -> int:
    """What a thread has used: one in fifty has nothing left, one in ten is near its limit."""
    if thread % 50 == 0:
        return LIMIT
    return NEAR if thread % 10 == 1 else FEW


def tracked(threads: int, *, all_near: bool = False) -> CollectorRegistry:
    """The metrics of an agent with so many threads."""
    registry = CollectorRegistry()
    recorder = recorder_of(Telemetry(registry=registry, spans="off"))
    terms = [
        fixed(ToolCallLimit("search", thread_limit=LIMIT)),
        fixed(ToolCallLimit(thread_limit=LIMIT * 10)),
    ]
    for thread in range(threads):
        told = verdict(terms, f"thread-{thread}", NEAR if all_near else used(thread))
        recorder.record([told], started=time.time_ns())
    return registry


def measure(size: Size) -> Result:
    """Measure."""
    registries = {f"{each:,}": tracked(each) for each in size.tracked}
    registries |= {f"{size.tracked[-1]:,}, all near": tracked(size.tracked[-1], all_near=True)}
    rows, scrapes = [], []
    for threads, registry in registries.items():
        row = [threads]
        for path, app in (("/metrics", metrics_app), ("/quota.json", quota_app)):
            # A new app computes its answer anew.
            runs = (_watched(scraped(app(registry), path)) for _ in range(size.scrapes))
            took, late = zip(*[asyncio.run(each) for each in runs], strict=True)
            row += [number(each, 1) for each in (median(took), max(took), median(late), max(late))]
            if path == "/metrics":
                scrapes.append(median(took))
        rows.append(row)
    times = ("longest", "loop late", "latest")
    columns = ("threads", "/metrics", *times, "/quota.json", *times)
    note = (
        "Milliseconds. The first number is the median of answers that are computed anew, which the "
        "page's is at most once a second, and for a tenth of the time. *loop late* is how late a "
        f"timer of {_TICK * 1_000:.0f} ms on the event loop is meanwhile, as the median. 500 "
        "threads are exported. One in ten is near a limit, and one in fifty has nothing left. "
        "The longest scrape is the first: later ones rate only threads that have had a call since."
    )
    what = f"scrape with {size.tracked[-1]:,} tracked threads, to one with {size.tracked[0]:,}"
    ratio = Ratio(what, 3, divided(scrapes[-2], scrapes[0]))
    return Result(Table("Scraping", columns, rows, note), is_of_page=False, ratios=[ratio])


async def _watched(doing: Coroutine[Any, Any, object]) -> tuple[float, float]:
    """How many milliseconds it takes, and how late the event loop is at most meanwhile."""
    late = 0.0

    async def tick() -> None:
        nonlocal late
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_TICK)
            late = max(late, time.perf_counter() - before - _TICK)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    started = time.perf_counter()
    await doing
    took = time.perf_counter() - started
    # What kept the loop from its last tick.
    await asyncio.sleep(2 * _TICK)
    ticking.cancel()
    with suppress(asyncio.CancelledError):
        await ticking
    return took * 1_000, late * 1_000


async def scraped(app: Any, path: str = "/metrics") -> int:
    """Scrape as a server does.

    Returns:
        The bytes of the answer.
    """
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    await app(scope, receive, send)
    return sum(len(message.get("body", b"")) for message in sent)

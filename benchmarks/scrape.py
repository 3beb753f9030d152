"""Scraping the metrics of many threads, and how late the event loop is meanwhile."""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from prometheus_client import CollectorRegistry

from benchmarks.checked import Used, check
from benchmarks.report import Ratio, Result, Table, divided, number
from benchmarks.sizes import Size
from langchain_quota import Telemetry, ToolCallLimit, metrics_app, quota_app
from langchain_quota.limits.call import Call
from langchain_quota.middleware.context import fixed
from langchain_quota.telemetry import recorder_of

LIMIT = 100
NEAR = 90
FEW = 10
_TICK = 0.001


@dataclass(frozen=True)
class Scraped:
    """What is scraped of so many threads, and how long each scrape took, in milliseconds."""

    threads: int
    has_urgent: bool
    registry: CollectorRegistry
    took: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    """How late the event loop was at most."""
    size: list[int] = field(default_factory=list)
    """The bytes of the answer."""


def used(thread: int) -> int:
    """What a thread has used: one in fifty has nothing left, one in ten is near its limit."""
    if thread % 50 == 0:
        return LIMIT
    return NEAR if thread % 10 == 1 else FEW


def tracked(threads: int, *, first: int = 0, all_near: bool = False) -> CollectorRegistry:
    """The metrics of an agent with so many threads, of which the first has a number."""
    registry = CollectorRegistry()
    recorder = recorder_of(Telemetry(registry=registry, spans="off"))
    terms = [
        fixed(ToolCallLimit("search", thread_limit=LIMIT)),
        fixed(ToolCallLimit(thread_limit=LIMIT * 10)),
    ]
    for thread in range(first, first + threads):
        count = NEAR if all_near else used(thread)
        call = Call("tool", "search", "call_1", agent="benchmark", thread_id=f"thread-{thread}")
        usage = {each.limit.counter: Used(count, 1) for each in terms}
        recorder.record(check(terms, usage, [call]).verdicts, started=time.time_ns())
    return registry


def measure(size: Size) -> Result:
    """Measure."""
    most = max(size.tracked)
    scenes = [
        *(Scraped(each, has_urgent=False, registry=tracked(each)) for each in size.tracked),
        Scraped(most, has_urgent=True, registry=tracked(most, all_near=True)),
    ]
    idle = asyncio.run(_measure(scenes, size.scrapes))
    rows = [
        [
            f"{each.threads:,}{', all near' if each.has_urgent else ''}",
            number(median(each.took), 1),
            number(max(each.took), 1),
            number(median(each.late), 1),
            number(max(each.late), 1),
            number(each.size[-1], 0),
        ]
        for each in scenes
    ]
    columns = ("threads", "scrape", "longest", "loop late", "latest", "bytes")
    note = (
        "Milliseconds. *scrape* is the median of all scrapes of `metrics_app`. *loop late* is how "
        f"late a timer of {_TICK * 1_000:.0f} ms on the event loop is during a scrape, as the "
        "median, and *latest* the longest delay. Without a scrape it is "
        f"{number(median(idle), 1)}. 500 threads are exported. One in ten of the tracked threads "
        "is near a limit, and one in fifty has nothing left."
    )
    least, largest = scenes[0], scenes[-2]
    ratio = Ratio(
        f"scrape with {largest.threads:,} tracked threads, to one with {least.threads:,}",
        3,
        divided(median(largest.took), median(least.took)),
    )
    pages = asyncio.run(_measure_pages([each for each in scenes if not each.has_urgent], size))
    return Result([Table("Scraping", columns, rows, note), pages], [ratio])


async def _measure_pages(scenes: list[Scraped], size: Size) -> Table:
    """Read the page's data, computed anew each time, and once more."""
    rows = []
    for scene in scenes:
        first, late, again = list[float](), list[float](), list[float]()
        for _ in range(size.scrapes):
            app = quota_app(scene.registry)
            for took in (first, again):
                _, milliseconds, delay = await _watched(scraped(app, "/quota.json"))
                took.append(milliseconds)
                if took is first:
                    late.append(delay)
        numbers = median(first), max(first), median(late), max(late), median(again)
        rows.append([f"{scene.threads:,}", *(number(each, 1) for each in numbers)])
    columns = ("threads", "computed", "longest", "loop late", "latest", "again")
    note = (
        "Milliseconds of `/quota.json`. *computed* is an answer that is computed anew, which "
        "happens at most once a second, and at most for a tenth of the time; *again* is any other "
        "answer. *loop late* and *latest* are as above."
    )
    return Table("The page", columns, rows, note)


async def _measure(scenes: list[Scraped], scrapes: int) -> list[float]:
    """Scrape each in turn.

    Returns:
        How late the event loop is when nothing is scraped, in milliseconds.
    """
    idle = []
    for _ in range(scrapes):
        for each in scenes:
            app = metrics_app(each.registry)
            size, took, late = await _watched(scraped(app))
            each.size.append(size)
            each.took.append(took)
            each.late.append(late)
        idle.append((await _watched(asyncio.sleep(0.05, 0)))[2])
    return idle


async def _watched(doing: Coroutine[Any, Any, int]) -> tuple[int, float, float]:
    """What it gives, how long it takes, and how late the event loop is at most meanwhile."""
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
    given = await doing
    took = time.perf_counter() - started
    # What kept the loop from its last tick.
    await asyncio.sleep(2 * _TICK)
    ticking.cancel()
    with suppress(asyncio.CancelledError):
        await ticking
    return given, took * 1_000, late * 1_000


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

    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "query_string": b"",
        "headers": [],
    }
    await app(scope, receive, send)
    return sum(len(message.get("body", b"")) for message in sent)

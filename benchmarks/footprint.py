"""How much memory a thread, a count and a remembered request take."""

import gc
import time
import tracemalloc
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from benchmarks.checked import unreached, verdict
from benchmarks.report import Result, Size, Table, number
from benchmarks.scenes import UNREACHED
from langchain_quota import MemoryStore, Telemetry
from langchain_quota.core.admission import AcquireRequest, CountRef, Demand, Threshold
from langchain_quota.telemetry import recorder_of

FEW, MANY = 1, 8
"""Limits of a tool."""


def measure(size: Size) -> Result:
    """Measure."""
    threads = size.remembered
    few, many = (_tracked(threads, limits) / threads for limits in (FEW, MANY))
    counts, requests = (_held(threads, names=names) / threads for names in (False, True))
    rows = [
        ["telemetry: a tracked thread with 1 limit", number(few, 0)],
        ["telemetry: each further limit of the thread", number((many - few) / (MANY - FEW), 0)],
        ["`MemoryStore`: a count", number(counts, 0)],
        ["`MemoryStore`: a request with 1 limit, for an hour", number(requests - counts, 0)],
    ]
    note = (
        f"The mean of {threads:,} threads, counts or requests: the bytes that Python has allocated."
    )
    return Result(Table("Memory", ("item", "bytes"), rows, note), is_of_page=False)


def _tracked(threads: int, limits: int) -> int:
    """The bytes of the table of so many threads, each with so many limits."""
    recorder = recorder_of(Telemetry(registry=CollectorRegistry(), spans="off"))
    terms = unreached(limits)

    def record(*numbers: int) -> None:
        for each in numbers:
            recorder.record([verdict(terms, f"thread-{each}")], started=time.time_ns())

    # The series of the counters are there before.
    record(-1)
    return _allocated(lambda: record(*range(threads)))


def _held(requests: int, *, names: bool) -> int:
    """The bytes of a store after so many requests, each with a count, and perhaps a name."""
    store = MemoryStore()
    return _allocated(lambda: [ask(store, number, names=names) for number in range(requests)])


def ask(store: MemoryStore, number: int, *, names: bool) -> object:
    """Charge a call to the count of a thread that has this number."""
    name = f"{number:032x}" if names else ""
    counter = CountRef(f"search:thread:thread-{number}", mirrored=True)
    demand = Demand({"search": 1}, (Threshold("limit", "thread", "search", UNREACHED),))
    return store.acquire(AcquireRequest(name, name and f"a{name}", {"search": counter}, (demand,)))


def _allocated(doing: Callable[[], object]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        doing()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

"""How much memory a thread, a count and a remembered request take."""

import gc
import time
import tracemalloc
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from benchmarks.checked import Used, check
from benchmarks.report import Result, Table, number
from benchmarks.scenes import UNREACHED
from benchmarks.sizes import Size
from langchain_quota import MemoryStore, Telemetry, ToolCallLimit
from langchain_quota.core.admission import AcquireRequest, CountRef, Demand, Threshold
from langchain_quota.limits.call import Call
from langchain_quota.middleware.context import fixed
from langchain_quota.telemetry import recorder_of

FEW, MANY = 1, 8
"""Limits of a tool."""


def measure(size: Size) -> Result:
    """Measure."""
    threads = size.remembered
    few, many = (tracked_bytes(threads, limits) / threads for limits in (FEW, MANY))
    further = (many - few) / (MANY - FEW)
    counts = held_bytes(threads, names=False) / threads
    questions = held_bytes(threads, names=True) / threads
    rows = [
        ["telemetry: a tracked thread with 1 limit", number(few, 0)],
        ["telemetry: each further limit of the thread", number(further, 0)],
        ["`MemoryStore`: a count", number(counts, 0)],
        ["`MemoryStore`: a request with 1 limit, for an hour", number(questions - counts, 0)],
    ]
    note = (
        f"The mean of {threads:,} threads, counts or requests: the bytes that Python has allocated."
    )
    return Result([Table("Memory", ("item", "bytes"), rows, note)])


def tracked_bytes(threads: int, limits: int) -> int:
    """The bytes of the table of so many threads, each with so many limits."""
    recorder = recorder_of(Telemetry(registry=CollectorRegistry(), spans="off"))
    terms = [
        fixed(ToolCallLimit("search", thread_limit=UNREACHED, name=f"limit-{index}"))
        for index in range(limits)
    ]

    def record(thread: int) -> None:
        call = Call("tool", "search", "call_1", agent="benchmark", thread_id=f"thread-{thread}")
        usage = {each.limit.counter: Used(1, 1) for each in terms}
        recorder.record(check(terms, usage, [call]).verdicts, started=time.time_ns())

    # The series of the counters are there before.
    record(-1)

    def fill() -> None:
        for thread in range(threads):
            record(thread)

    return _allocated(fill)


def held_bytes(questions: int, *, names: bool) -> int:
    """The bytes that a store takes for so many requests, each with a count of its own.

    Args:
        questions: How many.
        names: Whether the requests have names, by which the store remembers them.
    """
    store = MemoryStore()
    return _allocated(lambda: [ask(store, number, names=names) for number in range(questions)])


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

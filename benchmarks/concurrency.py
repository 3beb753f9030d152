"""Many runs at the same time."""

import asyncio
import time
from statistics import quantiles

from langgraph.checkpoint.memory import InMemorySaver

from benchmarks.report import NOTHING, Result, Table, number
from benchmarks.scenes import NONE, agent, run
from benchmarks.sizes import Size

COMPARED = (
    NONE,
    "LangChain, 2",
    "LangChain, 8",
    "drop-in, 2",
    "QuotaMiddleware, 8",
    "Inline, 2",
    "Inline, 8",
)


def measure(size: Size) -> Result:
    """Measure."""
    runs, steps = size.concurrent
    latencies: dict[str, list[float]] = {}
    for _ in range(size.crowds):
        for setup in COMPARED:
            taken = asyncio.run(_latencies(setup, runs, steps))
            latencies[setup] = min(taken, latencies.get(setup, taken), key=max)
    none_p50, none_p99 = _percentiles(latencies[NONE])
    rows = []
    for setup, taken in latencies.items():
        p50, p99 = _percentiles(taken)
        added = [NOTHING, NOTHING]
        if setup != NONE:
            added = [number(p50 - none_p50), number(p99 - none_p99)]
        rows.append([setup, number(runs * steps / max(taken), 0), number(p50), number(p99), *added])
    columns = ("limits", "steps per second", "p50", "p99", "added p50", "added p99")
    note = (
        f"{runs:,} runs of {steps} steps begin at the same time on one event loop. Checkpoints are "
        f"in memory. Every row is the quickest of {size.crowds} measurements, taken by turns. p50 "
        "and p99 are seconds from the common beginning to the end of a run."
    )
    return Result([Table("Concurrent runs", columns, rows, note)])


async def _latencies(setup: str, runs: int, steps: int) -> list[float]:
    made = agent(setup, InMemorySaver())
    await run(made, 1, "warm")
    began = time.perf_counter()

    async def timed(thread: str) -> float:
        await run(made, steps, thread)
        return time.perf_counter() - began

    return await asyncio.gather(*(timed(f"thread-{number}") for number in range(runs)))


def _percentiles(values: list[float]) -> tuple[float, float]:
    found = quantiles(values, n=100, method="inclusive")
    return found[49], found[98]

"""What limits add to a step, as users feel it: CPU time of all threads, and time by the clock."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.costs import costs
from benchmarks.optional import required
from benchmarks.report import Ratio, Result, Table, number
from benchmarks.scenes import HOOKS, NONE, SETUPS, STORED, TWO_HOOKS, agent, run
from benchmarks.sizes import Size
from benchmarks.workloads import Step
from langchain_quota import MemoryStore

LENGTHS = (3, 10, 60)
"""The numbers of steps of the runs that are measured."""

USUAL = 10
"""The number of steps of the runs that the targets are about."""

BESIDE = "LangChain, 2"
"""Beside which set-up those with a store are shown."""

RIVALS = {
    "QuotaMiddleware, tool": ("LangChain, tool", 2.0),
    "QuotaMiddleware, model": ("LangChain, model", 1.05),
    "QuotaMiddleware, 2": ("LangChain, 2", 1.12),
    "QuotaMiddleware, 8": ("LangChain, 8", 0.41),
    "Inline, 2": ("LangChain, 2", 0.75),
    "Inline, 8": ("LangChain, 8", 0.27),
    "drop-in, tool": ("LangChain, tool", 1.9),
    "drop-in, model": ("LangChain, model", 1.65),
    "drop-in, 2": ("LangChain, 2", 1.65),
}
"""Beside which set-up each of ours is measured, and the most that it may add, to what that adds."""

TO_HOOKS = {10: 1.5, 60: 1.25}
"""The same for two limits beside two hooks that write the same keys, by steps of a run."""

Nanoseconds = list[tuple[int, int]]
"""Of each round: CPU time of all threads, and time by the clock."""


class Added(NamedTuple):
    """What a set-up adds to a step, in microseconds.

    Attributes:
        cpu: CPU time of all threads: the difference of the first quartiles of all rounds, because
            whatever else runs on the machine can only add to a round.
        middle: The median of the differences in each round.
        high: Their third quartile.
        clock: Time by the clock, a median.
    """

    cpu: float
    middle: float
    high: float
    clock: float


def measure(size: Size) -> Result:
    """Measure."""
    agents = {setup: agent(setup) for setup in SETUPS | HOOKS}
    added = {steps: asyncio.run(_added(agents, steps, size.rounds)) for steps in LENGTHS}
    counted = _counted(size)
    tables = [_table(steps, found, counted) for steps, found in added.items()]
    ratios = [
        Ratio(
            f"{setup}: what it adds, to {other}; runs of {USUAL} steps",
            most,
            added[USUAL][setup].cpu / added[USUAL][other].cpu,
            added[USUAL][f"hooks of {setup}"].cpu / added[USUAL][other].cpu,
        )
        for setup, (other, most) in RIVALS.items()
    ]
    ratios += [
        Ratio(
            f"QuotaMiddleware, 2: what it adds, to {TWO_HOOKS}; runs of {steps} steps",
            most,
            added[steps]["QuotaMiddleware, 2"].cpu / added[steps][TWO_HOOKS].cpu,
        )
        for steps, most in TO_HOOKS.items()
    ]
    return Result(tables, ratios, _of_page(added[USUAL]))


def measure_stores(size: Size) -> Result:
    """Measure limits whose counts a store keeps."""
    stores: dict[str, Any] = {"memory": MemoryStore()}
    missing = ""
    with ExitStack() as running:
        try:
            with required():
                from langchain_quota import PostgresStore, RedisStore  # noqa: PLC0415 - needs both
                from tests.server.postgres import running_postgres  # noqa: PLC0415 - needs psycopg
                from tests.server.redis import running_redis  # noqa: PLC0415 - needs redis

                directory = Path(running.enter_context(TemporaryDirectory(prefix="benchmark-")))
                url = running.enter_context(running_redis(directory)).url
                stores["Redis"] = RedisStore(url, timeout=60)
                database = running.enter_context(running_postgres()).database()
                stores["PostgreSQL"] = PostgresStore(database, timeout=60)
        except LookupError as error:
            missing = f" Not measured: {error}."
        rows = asyncio.run(_in_stores(stores, size.rounds))
    columns = ("limits", "requests a step", "CPU µs a step", "to LangChain")
    note = (
        "*in a store*: QuotaMiddleware's limits of a run; *per user*: quotas of a user's day. The "
        f"servers do not wait for the disk.{missing}"
    )
    table = Table("What limits in a store add to a step", columns, rows, note)
    return Result([table], tables_of_page=[table])


async def _in_stores(stores: Mapping[str, Any], rounds: int) -> Sequence[Sequence[str]]:
    asked: list[object] = []
    agents = {setup: agent(setup) for setup in (NONE, BESIDE)}
    for where, store in stores.items():
        if where == "PostgreSQL":
            await store.asetup()
        store.aacquire = _noting(asked, store.aacquire)
        agents |= {f"{setup}: {where}": agent(setup, store=store) for setup in STORED}
    added = await _added(agents, USUAL, rounds)
    rows = []
    for name, each in [*added.items()][1:]:
        asked.clear()
        await run(agents[name], USUAL, "counted")
        numbers = len(asked) / USUAL, each.cpu, each.cpu / added[BESIDE].cpu
        rows.append([name.removeprefix("QuotaMiddleware, "), *map(number, numbers, (1, 0, 2))])
    for store in [*stores.values()][1:]:
        await store.aclose()
    return rows


def _noting(asked: list[object], acquire: Callable[[Any], Awaitable[Any]]) -> Any:
    def noted(request: Any) -> Awaitable[Any]:
        asked.append(request)
        return acquire(request)

    return noted


async def _added(agents: Mapping[str, Any], steps: int, rounds: int) -> Mapping[str, Added]:
    """What each set-up adds to a step of runs of so many; all take turns."""
    taken = await _taken(agents, steps, rounds)
    none = taken[NONE]
    found = {}
    for setup, own in taken.items():
        cpu, clock = (
            [(mine[i] - bare[i]) / steps / 1_000 for mine, bare in zip(own, none, strict=True)]
            for i in (0, 1)
        )
        _, middle, high = quantiles(cpu, n=4)
        low, low_bare = (
            quantiles([rounds[0] / steps / 1_000 for rounds in turns], n=4)[0]
            for turns in (own, none)
        )
        found[setup] = Added(low - low_bare, middle, high, median(clock))
    return found


async def _taken(agents: Mapping[str, Any], steps: int, rounds: int) -> Mapping[str, Nanoseconds]:
    taken: dict[str, Nanoseconds] = {setup: [] for setup in agents}
    turns = [*agents.items()]
    order = random.Random(0)  # noqa: S311 - no secret
    for number_of in range(-1, rounds):
        # In one order, each would always find what the same other one left in the caches.
        order.shuffle(turns)
        for setup, each in turns:
            began, started = time.process_time_ns(), time.perf_counter_ns()
            await run(each, steps, f"thread-{number_of}")
            took = time.process_time_ns() - began, time.perf_counter_ns() - started
            # The first round warms up.
            if number_of >= 0:
                taken[setup].append(took)
    return taken


def _counted(size: Size) -> Mapping[str, float]:
    """The instructions that each set-up adds to a step, if they can be counted."""
    if not size.counts_instructions:
        return {}
    works = {setup: Step(setup, has_memory=False) for setup in SETUPS | HOOKS}
    found = costs([*works.values()], size.steps, counted=True, rounds=size.rounds)
    if found.unit != "instructions":
        return {}
    none = found.of[works[NONE]]
    return {setup: found.of[work] - none for setup, work in works.items()}


def _table(steps: int, added: Mapping[str, Added], counted: Mapping[str, float]) -> Table:
    rows = [
        (setup, *_shown(each), number(each.clock, 0), number(counted.get(setup), 0))
        for setup, each in added.items()
        if setup != NONE
    ]
    columns = ("limits", "CPU time", "median, third quartile", "by the clock", "instructions")
    note = (
        "In microseconds; the instructions are those of a step. A step is a model call and a tool "
        "call. The model and the tools answer immediately. Telemetry is on. The SDK makes the "
        "spans, and does not sample them."
    )
    return Table(f"What limits add to a step, in runs of {steps} steps", columns, rows, note)


def _shown(each: Added) -> tuple[str, str]:
    return number(each.cpu, 0), f"{number(each.middle, 0)}, {number(each.high, 0)}"


def _of_page(added: Mapping[str, Added]) -> Mapping[str, Mapping[str, str]]:
    found = {}
    for setup, each in added.items():
        if setup not in HOOKS and setup != NONE:
            other = RIVALS.get(setup)
            hooks = added.get(f"hooks of {setup}")
            found[setup] = {
                "CPU µs a step": number(each.cpu, 0),
                "median, third quartile": _shown(each)[1],
                "its hooks alone": number(None if hooks is None else hooks.cpu, 0),
                "to LangChain and telemetry": number(_ratio(added, each, other, " and telemetry")),
                "to LangChain": number(_ratio(added, each, other)),
            }
    return found


def _ratio(
    added: Mapping[str, Added], ours: Added, rival: tuple[str, float] | None, kind: str = ""
) -> float | None:
    """Return what ours adds, to what its rival of a kind does."""
    if rival is None:
        return None
    return ours.cpu / added[rival[0].replace("LangChain", f"LangChain{kind}")].cpu

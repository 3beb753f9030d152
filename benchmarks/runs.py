"""Runs of ten steps: how long they take with each checkpointer, and what it stores of them."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from itertools import count, product
from statistics import median
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver

from benchmarks.report import Ratio, Result, Table, divided, number
from benchmarks.savers import SAVERS, Look, Stored
from benchmarks.scenes import IDLE_HOOKS, NONE, SETUPS, WRAP_HOOK, agent, run
from benchmarks.sizes import Size

STEPS = 10
NO_SAVER = "no checkpointer"
WHERE = (NO_SAVER, *SAVERS)
SQLITE, POSTGRES = "SQLite", "PostgreSQL"

LONG = "x" * 1_000
"""The answer of the tools, where stored bytes are measured with long messages."""

BYTES = (("QuotaMiddleware, 8", IDLE_HOOKS, 2.3), ("Inline, 8", WRAP_HOOK, 1.15))
"""The set-ups with a target for stored bytes, the floor of each, and the target."""
COMPARED = (NONE, *(each for *pair, _ in BYTES for each in pair))

Times = dict[str, float]
"""The milliseconds of a run, by set-up."""


def measure(size: Size) -> Result:
    """Measure."""
    return asyncio.run(_measure(size))


async def _measure(size: Size) -> Result:
    times: dict[str, Times] = {NO_SAVER: await _timed(None, size.rounds)}
    stored: dict[str, dict[str, Stored]] = {}
    long: dict[str, dict[str, Stored]] = {}
    missing: dict[str, str] = {}
    for name, saver in SAVERS.items():
        try:
            async with saver() as (opened, look):
                stored[name] = {each: await per_step(each, opened, look) for each in SETUPS}
                long[name] = {each: await per_step(each, opened, look, LONG) for each in COMPARED}
                times[name] = await _timed(opened, size.rounds)
        except LookupError as error:
            missing[name] = str(error)
    tables = [
        _times_table(times, missing),
        *(_stored_table(name, found) for name, found in stored.items()),
    ]
    return Result(tables, _stored_ratios(stored, long), _of_page(times, stored))


async def stored_of(
    setup: str, steps: int, saver: BaseCheckpointSaver[Any], look: Look, answer: str = "done"
) -> Stored:
    """What is stored of a run of so many steps whose tools give an answer."""
    thread = f"{setup}, {steps} steps, {len(answer)}"
    await run(agent(setup, saver, answer=answer), steps, thread)
    return await look(thread)


async def per_step(
    setup: str, saver: BaseCheckpointSaver[Any], look: Look, answer: str = "done"
) -> Stored:
    """What one step after five others adds to what is stored."""
    many = await stored_of(setup, 6, saver, look, answer)
    return many - await stored_of(setup, 5, saver, look, answer)


async def _timed(saver: BaseCheckpointSaver[Any] | None, rounds: int) -> Times:
    agents = {setup: agent(setup, saver) for setup in SETUPS}
    threads = count()
    taken: dict[str, list[float]] = {setup: [] for setup in SETUPS}
    for each in agents.values():
        await run(each, 1, f"thread-{next(threads)}")
    for _ in range(rounds):
        for setup, each in agents.items():
            thread = f"thread-{next(threads)}"
            started = time.perf_counter()
            await run(each, STEPS, thread)
            taken[setup].append((time.perf_counter() - started) * 1_000)
            if saver is not None:
                await saver.adelete_thread(thread)
    return {setup: median(each) for setup, each in taken.items()}


def _over(times: Times, setup: str) -> float:
    return times[setup] - times[NONE]


def _times_table(times: Mapping[str, Times], missing: Mapping[str, str]) -> Table:
    rows = []
    for setup in SETUPS:
        row = [setup]
        for where in WHERE:
            known = times.get(where)
            row.append(number(None if known is None else known[setup], 1))
            extra = None if known is None or setup == NONE else _over(known, setup) / STEPS
            row.append(number(extra))
        rows.append(row)
    columns = ["limits", *(each for where in WHERE for each in (where, "extra per step"))]
    found = "".join(f" {name}: not measured, {why}." for name, why in missing.items())
    note = (
        "Milliseconds by the clock, as the median of all rounds, for ten steps and a last model "
        "call. The extra is how much longer a step takes than without limits. PostgreSQL does not "
        f"sync to disk here.{found}"
    )
    return Table("Runs of ten steps", columns, rows, note)


def _stored_table(name: str, stored: Mapping[str, Stored]) -> Table:
    rows: Sequence[Sequence[str]] = [
        (setup, *(number(each, 0) for each in (it.supersteps, it.checkpoints, it.rows, it.size)))
        for setup, it in stored.items()
    ]
    columns = ("limits", "supersteps", "checkpoints", "rows", "bytes")
    note = "This is what the sixth step of a run adds."
    return Table(f"What a step stores: {name}", columns, rows, note)


def _of_page(
    times: Mapping[str, Times], stored: Mapping[str, Mapping[str, Stored]]
) -> dict[str, dict[str, str]]:
    where, known = "PostgreSQL", stored.get(POSTGRES)
    return {
        setup: {
            f"ms a step, {where}": number(_over(times[where], setup) / STEPS),
            f"bytes a step, {where}": number(known[setup].size - known[NONE].size, 0),
        }
        for setup in (SETUPS if known else ())
        if known and setup != NONE
    }


def _stored_ratios(
    stored: Mapping[str, Mapping[str, Stored]], long: Mapping[str, Mapping[str, Stored]]
) -> list[Ratio]:
    found: list[Ratio] = []
    for where, (tools, known), (setup, floor, most) in product(
        (SQLITE, POSTGRES),
        (("answers of 4 characters", stored), (f"answers of {len(LONG):,} characters", long)),
        BYTES,
    ):
        sizes = {each: stores.size for each, stores in known.get(where, {}).items()}
        none = sizes.get(NONE)
        ours, least = (divided(sizes.get(each), none) for each in (setup, floor))
        what = f"{setup}: stored bytes per step, to no limits; {where}, {tools}"
        found.append(Ratio(what, most, ours, least))
    added = [
        each[f"Inline, {limits}"] - each[NONE]
        for each in stored.values()
        for limits in ("1", "2", "8")
    ]
    checkpoints = max((each.checkpoints for each in added), default=None)
    return [*found, Ratio("Inline: checkpoints added per step", 0, checkpoints)]

"""Runs of ten steps: how long they take with each checkpointer, and what it stores of them."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from itertools import count
from statistics import median
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver

from tests.benchmarks.report import Ratio, Result, Table, divided, number
from tests.benchmarks.savers import SAVERS, Look, Stored
from tests.benchmarks.scenes import LIMITERS, NONE, SETUPS, agent, run
from tests.benchmarks.sizes import Size

STEPS = 10
NO_SAVER = "no checkpointer"
WHERE = (NO_SAVER, *SAVERS)

Times = dict[str, float]
"""The milliseconds of a run, by set-up."""


def measure(size: Size) -> Result:
    """Measure."""
    return asyncio.run(_measure(size))


async def _measure(size: Size) -> Result:
    times: dict[str, Times] = {NO_SAVER: await _timed(None, size.rounds)}
    stored: dict[str, dict[str, Stored]] = {}
    missing: dict[str, str] = {}
    for name, saver in SAVERS.items():
        try:
            async with saver() as (opened, look):
                stored[name] = {each: await per_step(each, opened, look) for each in SETUPS}
                times[name] = await _timed(opened, size.rounds)
        except LookupError as error:
            missing[name] = str(error)
    tables = [
        _times_table(times, missing),
        *(_stored_table(name, found) for name, found in stored.items()),
    ]
    return Result(tables, [*_time_ratios(times), *_stored_ratios(stored)])


async def stored_of(setup: str, steps: int, saver: BaseCheckpointSaver[Any], look: Look) -> Stored:
    """What is stored of a run of so many steps."""
    thread = f"{setup}, {steps} steps"
    await run(agent(setup, saver), steps, thread)
    return await look(thread)


async def per_step(setup: str, saver: BaseCheckpointSaver[Any], look: Look) -> Stored:
    """What one step after five others adds to what is stored."""
    many = await stored_of(setup, 6, saver, look)
    return many - await stored_of(setup, 5, saver, look)


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
        "Milliseconds by the clock, as the median of all rounds. The first number is a whole run "
        "of ten steps and a last model call. The extra is how much longer a step takes than "
        f"without limits. PostgreSQL does not sync to disk here.{found}"
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


def _time_ratios(times: Mapping[str, Times]) -> list[Ratio]:
    found = []
    for where, inline in ((NO_SAVER, 1 / 10), ("SQLite", 1 / 12), ("PostgreSQL", 1 / 12)):
        known = times.get(where)
        for setup, most in (("Inline, 8", inline), ("QuotaMiddleware, 8", 1 / 3)):
            share = None
            if known is not None:
                share = divided(_over(known, setup), _over(known, "LangChain, 8"))
            what = f"{setup} limits: overhead, to LangChain's 8; {where}, by the clock"
            found.append(Ratio(what, most, share))
    known = times[NO_SAVER]
    found += [
        Ratio(
            f"drop-in: run with {what}, to LangChain's; {NO_SAVER}, by the clock",
            1.15,
            divided(known[f"drop-in, {which}"], known[f"LangChain, {which}"]),
        )
        for which, what in LIMITERS.items()
    ]
    return found


def _stored_ratios(stored: Mapping[str, Mapping[str, Stored]]) -> list[Ratio]:
    added = [
        found[f"Inline, {limits}"] - found[NONE]
        for found in stored.values()
        for limits in ("1", "2", "8")
    ]
    supersteps = max((each.supersteps for each in added), default=None)
    checkpoints = max((each.checkpoints for each in added), default=None)
    return [
        Ratio("Inline: supersteps added per step", 0, supersteps),
        Ratio("Inline: checkpoints added per step", 0, checkpoints),
    ]

"""What budgets of tokens and money add to a step whose calls are limited."""

from benchmarks.costs import Costs, costs
from benchmarks.report import Ratio, Result, Table, number
from benchmarks.scenes import BUDGETS
from benchmarks.sizes import Size
from benchmarks.workloads import Step

WITHOUT = {"QuotaMiddleware": "QuotaMiddleware, 8", "Inline": "Inline, 8"}
"""The set-ups without budgets, by who holds the limits."""


def measure(size: Size) -> Result:
    """Measure."""
    setups = [*WITHOUT.values(), *BUDGETS]
    found = costs(
        [step(setup, has_memory=has_memory) for setup in setups for has_memory in (False, True)],
        size.steps,
        counted=size.counts_instructions,
        rounds=size.rounds,
    )
    return Result([_table(found)], _ratios(found))


def step(setup: str, *, has_memory: bool) -> Step:
    """A step whose model reports what it has used, with or without budgets."""
    return Step(setup, has_memory, reports=True)


def _ratio(found: Costs, setup: str, *, has_memory: bool) -> float:
    without = WITHOUT[setup.partition(",")[0]]
    costs, base = (found.of[step(each, has_memory=has_memory)] for each in (setup, without))
    return costs / base


def _table(found: Costs) -> Table:
    rows = []
    for setup in [*WITHOUT.values(), *BUDGETS]:
        row = [setup]
        for has_memory in (False, True):
            row.append(number(found.of[step(setup, has_memory=has_memory)], 0))
            row.append(number(_ratio(found, setup, has_memory=has_memory), 3))
        rows.append(row)
    columns = ["limits", "no checkpointer", "ratio", "in memory", "ratio"]
    note = (
        "The model reports what it has used. The ratio compares with a step of the same "
        "middleware without budgets."
    )
    return Table(f"A step with budgets, in {found.unit}", columns, rows, note)


def _ratios(found: Costs) -> list[Ratio]:
    setup = "QuotaMiddleware, 8 and tokens"
    return [
        Ratio(
            f"QuotaMiddleware: step with a token limit, to one without; {where}, in {found.unit}",
            1.05,
            _ratio(found, setup, has_memory=has_memory),
        )
        for has_memory, where in ((False, "no checkpointer"), (True, "memory"))
    ]

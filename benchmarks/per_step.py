"""What a step costs, under each limiter, and with each kind of telemetry."""

from itertools import product

from benchmarks.costs import Costs, costs
from benchmarks.report import Ratio, Result, Table, number
from benchmarks.scenes import HOOKS, NONE, SETUPS, TWO_HOOKS, WRAP_HOOK, Mode
from benchmarks.sizes import Size
from benchmarks.workloads import Step

MODES: tuple[Mode, ...] = ("off", "no SDK", "not sampled", "sampled")
OVERHEADS = (
    ("QuotaMiddleware, tool", "LangChain, tool", 1.2),
    ("QuotaMiddleware, model", "LangChain, model", 1.2),
    ("QuotaMiddleware, 2", "LangChain, 2", 0.85),
    ("QuotaMiddleware, 8", "LangChain, 8", 0.27),
    ("QuotaMiddleware, 2", TWO_HOOKS, 1.35),
    ("QuotaMiddleware, 8", TWO_HOOKS, 1.35),
    ("drop-in, model", "LangChain, model", 1.25),
    ("drop-in, tool", "LangChain, tool", 1.25),
    ("drop-in, 2", "LangChain, 2", 1.25),
    ("Inline, 8", "LangChain, 8", 0.12),
    ("Inline, 2", WRAP_HOOK, 1.8),
    ("Inline, 8", WRAP_HOOK, 1.8),
)
"""Two set-ups whose overheads over an agent without limits are compared, and the target."""

FLOORS = {
    "QuotaMiddleware, tool": "hooks of QuotaMiddleware, tool",
    "QuotaMiddleware, model": "hooks of QuotaMiddleware, model",
    "QuotaMiddleware, 2": "hooks of QuotaMiddleware, 2",
    "QuotaMiddleware, 8": "hooks of QuotaMiddleware, 2",
    "drop-in, model": "hooks of drop-in, model",
    "drop-in, tool": "hooks of drop-in, tool",
    "drop-in, 2": "hooks of drop-in, 2",
    "Inline, 2": WRAP_HOOK,
    "Inline, 8": WRAP_HOOK,
}
"""The set-ups that have the same hooks, write the same keys, and do nothing else."""

TELLING = ("drop-in, 2", "QuotaMiddleware, 8", "Inline, 8")


def measure(size: Size) -> Result:
    """Measure."""
    steps = [Step(*each) for each in product(SETUPS, (False, True))]
    hooks = [Step(setup, has_memory=False) for setup in HOOKS]
    telling = [
        Step(setup, has_memory=True, mode=mode)
        for setup, mode in product(TELLING, MODES)
        if mode != "not sampled"
    ]
    found = costs(
        [*steps, *hooks, *telling],
        size.steps,
        counted=size.counts_instructions,
        rounds=size.rounds,
    )
    return Result([_table(found), _telling(found)], _ratios(found))


def _table(found: Costs) -> Table:
    rows = []
    for setup in SETUPS:
        row = [setup]
        for has_memory in (False, True):
            own, none = found.of[Step(setup, has_memory)], found.of[Step(NONE, has_memory)]
            row += [number(own, 0), number(own - none, 0), number(own / none)]
        rows.append(row)
    columns = [
        "limits",
        *("no checkpointer", "over none", "ratio"),
        *("in memory", "over none", "ratio"),
    ]
    note = (
        "A step is a model call and a tool call. The model and the tools answer immediately. "
        "Telemetry is on. The SDK makes the spans, and does not sample them."
    )
    return Table(f"A step, in {found.unit}", columns, rows, note)


def _telling(found: Costs) -> Table:
    rows = []
    for setup in TELLING:
        none = found.of[Step(NONE, has_memory=True)]
        own = [found.of[Step(setup, has_memory=True, mode=mode)] for mode in MODES]
        rows.append([setup, *(f"{number(each, 0)} ({number(each / none)})" for each in own)])
    columns = ["limits", 'spans="off"', "no SDK", "not sampled", "sampled"]
    note = "Checkpoints are in memory. The ratio to a step without limits is in brackets."
    return Table(f"A step by what happens to spans, in {found.unit}", columns, rows, note)


def _ratios(found: Costs) -> list[Ratio]:
    def step(setup: str) -> float:
        return found.of[Step(setup, has_memory=False)]

    def over(setup: str) -> float:
        return step(setup) - step(NONE)

    where = f"no checkpointer, in {found.unit}"

    def floor(setup: str, other: str) -> float | None:
        least = FLOORS[setup]
        return None if least == other else over(least) / over(other)

    ratios = [
        Ratio(
            f"{setup}: overhead, to {other}; {where}",
            most,
            over(setup) / over(other),
            floor(setup, other),
        )
        for setup, other, most in OVERHEADS
    ]
    ratios.append(
        Ratio(
            f"Inline: step with 8 limits, to one with 1; {where}",
            1.05,
            step("Inline, 8") / step("Inline, 1"),
        )
    )
    return ratios

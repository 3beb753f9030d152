"""What a step costs, under each limiter, and with each kind of telemetry."""

from itertools import product

from tests.benchmarks.costs import Costs, costs
from tests.benchmarks.report import Ratio, Result, Table, number
from tests.benchmarks.scenes import LIMITERS, NONE, SETUPS, Mode
from tests.benchmarks.sizes import Size
from tests.benchmarks.workloads import Step

MODES: tuple[Mode, ...] = ("off", "no SDK", "not sampled", "sampled")
TELLING = ("drop-in, 2", "QuotaMiddleware, 8", "Inline, 8")


def measure(size: Size) -> Result:
    """Measure."""
    steps = [Step(*each) for each in product(SETUPS, (False, True))]
    telling = [
        Step(setup, has_memory=True, mode=mode)
        for setup, mode in product(TELLING, MODES)
        if mode != "not sampled"
    ]
    found = costs(
        [*steps, *telling],
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
    def step(setup: str, *, has_memory: bool) -> float:
        return found.of[Step(setup, has_memory)]

    def over(setup: str) -> float:
        return step(setup, has_memory=False) - step(NONE, has_memory=False)

    langchain = over("LangChain, 8")
    where = f"no checkpointer, in {found.unit}"
    ratios = [
        Ratio(f"{setup} limits: overhead, to LangChain's 8; {where}", most, over(setup) / langchain)
        for setup, most in (("Inline, 8", 1 / 10), ("QuotaMiddleware, 8", 1 / 3))
    ]
    for has_memory, where in ((False, "no checkpointer"), (True, "memory")):
        ratios.append(
            Ratio(
                f"Inline: step with 8 limits, to one with 1; {where}, in {found.unit}",
                1.05,
                step("Inline, 8", has_memory=has_memory) / step("Inline, 1", has_memory=has_memory),
            )
        )
        ratios += [
            Ratio(
                f"drop-in: step with {what}, to LangChain's; {where}, in {found.unit}",
                1.15,
                step(f"drop-in, {which}", has_memory=has_memory)
                / step(f"LangChain, {which}", has_memory=has_memory),
            )
            for which, what in LIMITERS.items()
        ]
    return ratios

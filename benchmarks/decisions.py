"""What one decision costs: its telemetry, beside a bare counter and a bare span."""

from benchmarks.costs import UNIT, costs, cpu_time
from benchmarks.report import Ratio, Result, Table, number
from benchmarks.scenes import Mode
from benchmarks.sizes import Size
from benchmarks.workloads import Bare, Checking, Counting, Emitting, Tracing, Work, attributes

MODES: tuple[Mode, ...] = ("not sampled",)

WORKS: dict[str, Work] = {
    "`inc()` of a counter's cached child": Counting(),
    "a bare span, recorded": Tracing(),
    "a bare span, two `inc()`, one `observe()`; not sampled": Bare("not sampled"),
    "the same, the span recorded, and an exemplar of both counters": Bare("sampled"),
    'a decision by 1 limit, spans="off"': Emitting(1, "off"),
    "a decision by 1 limit, no SDK": Emitting(1, "no SDK"),
    "a decision by 1 limit, span not sampled": Emitting(1, "not sampled"),
    "a decision by 1 limit, span recorded": Emitting(1, "sampled"),
    "a decision by 2 limits, span not sampled": Emitting(2, "not sampled"),
    "a decision by 8 limits, span not sampled": Emitting(8, "not sampled"),
    "checking by 1 limit": Checking(1),
    "checking by 8 limits": Checking(8),
}


def measure(size: Size) -> Result:
    """Measure."""
    works = list(WORKS.values())
    taken = cpu_time(works, size.decisions, size.rounds)
    found = costs(works, size.decisions, counted=size.counts_instructions, rounds=size.rounds)
    inc, span = Counting(), Tracing()
    rows = [
        [
            name,
            number(found.of[work], 0),
            number(found.of[work] / found.of[inc], 1),
            number(taken[work]),
            number(taken[work] / taken[inc], 1),
        ]
        for name, work in WORKS.items()
    ]
    columns = ("what", found.unit, "to `inc()`", UNIT, "to `inc()`")
    note = (
        "A decision is about a tool call on a thread. Every limit has a number for the thread and "
        f"one for the run. The span has {len(attributes())} attributes. The cost of checking is no "
        "part of a decision's cost."
    )
    ratios = []
    for unit, costs_of in {found.unit: found.of, UNIT: taken}.items():
        ratios += [
            Ratio(
                f"a decision, span not recorded ({mode}), to a bare `inc()`; in {unit}",
                20,
                costs_of[Emitting(1, mode)] / costs_of[inc],
                costs_of[Bare(mode)] / costs_of[inc],
            )
            for mode in MODES
        ]
        ratios.append(
            Ratio(
                f"a decision, span recorded, to a bare span; in {unit}",
                1.5,
                costs_of[Emitting(1, "sampled")] / costs_of[span],
                costs_of[Bare("sampled")] / costs_of[span],
            )
        )
    return Result([Table("The telemetry of a decision", columns, rows, note)], ratios)

"""What a request to a `MemoryStore` costs, beside checking by the state."""

from benchmarks.costs import Costs
from benchmarks.report import Ratio, Table, number
from benchmarks.workloads import Asking

STATE = Asking("state")
WORKS = {
    "checking a call by the state": STATE,
    "`MemoryStore.acquire`": Asking("store"),
    "the hooks' request to `MemoryStore`, and checking": Asking("hooks"),
}


def shown(found: Costs) -> tuple[Table, list[Ratio]]:
    """The table of what was measured, and the targets."""
    to_state = {name: found.of[work] / found.of[STATE] for name, work in WORKS.items()}
    rows = [
        [name, number(found.of[work], 0), number(to_state[name])] for name, work in WORKS.items()
    ]
    columns = ("work", found.unit, "ratio")
    note = (
        "One call is checked by one `thread_limit`. The ratio compares with checking by the state. "
        "The hooks also time the store, and handle its failures."
    )
    ratios = [
        Ratio(f"{name}, to checking by the state; in {found.unit}", 3, ratio)
        for name, ratio in to_state.items()
        if WORKS[name] != STATE
    ]
    return Table("A request to `MemoryStore`", columns, rows, note), ratios

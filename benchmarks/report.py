"""What a benchmark hands back, and how it is shown: Markdown, on the terminal and in the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NOTHING = "-"
"""The cell of what there is not."""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: Its heading.
        columns: The heads of the columns.
        rows: The cells.
        note: What stands below.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __str__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rule = ["-" * width for width in widths]
        text = "\n".join(_line(cells, widths) for cells in (self.columns, rule, *self.rows))
        note = f"\n\n{self.note}" if self.note else ""
        return f"## {self.title}\n\n{text}{note}\n"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"


@dataclass(frozen=True)
class Ratio:
    """A number that has a target.

    Attributes:
        what: What is compared.
        most: The target: at most this.
        measured: What was measured; `None` if it could not be.
        floor: The same ratio, measured for something that does only what cannot be left out;
            `None` if there is none.
    """

    what: str
    most: float
    measured: float | None
    floor: float | None = None

    @property
    def is_missed(self) -> bool:
        """Whether it was measured, and is over its target."""
        return self.measured is not None and self.measured > self.most

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table of targets."""
        met = "**not met**" if self.is_missed else "met"
        if self.measured is None:
            met = "not measured"
        return (self.what, f"≤ {self.most:.3g}", _short(self.measured), _short(self.floor), met)


def _short(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3g}"


@dataclass(frozen=True)
class Result:
    """What a benchmark measured.

    Attributes:
        tables: All measurements.
        ratios: The ratios that have a target.
        of_page: The cells of the table in the report, by set-up and column.
        tables_of_page: Further tables in the report.
    """

    tables: Sequence[Table] = ()
    ratios: Sequence[Ratio] = ()
    of_page: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    tables_of_page: Sequence[Table] = ()


def targets(ratios: Sequence[Ratio]) -> Table:
    """The table of targets."""
    columns = ("ratio", "target", "value", "floor", "result")
    note = (
        "A ratio of A to B is A divided by B. The overhead is what limits add to a step. The floor "
        "is the same ratio for something that does only what it must: a middleware with the same "
        "hooks and no limits, a span without a decision, or a script that runs the same commands "
        "of Redis. Where the floor is over the target, LangGraph takes more than the target allows."
    )
    return Table("Targets", columns, [each.cells for each in ratios], note)


def divided(part: float | None, whole: float | None) -> float | None:
    """A quotient; `None` where one of both is not known."""
    return None if part is None or not whole else part / whole


def number(value: float | None, digits: int = 2) -> str:
    """A number as a cell."""
    return NOTHING if value is None else f"{value:,.{digits}f}"

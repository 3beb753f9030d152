"""What a benchmark measures, how much, and how it is shown: as Markdown."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

NOTHING = "-"
"""The cell of what there is not."""


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        rounds: How often each set-up has its turn.
        tracked: How many threads there are when metrics are scraped.
        scrapes: How often.
        requests: How often a store is asked.
        remembered: How many threads, counts and requests are kept when their memory is measured.
        periods: For how many periods a provider's pace is kept.
    """

    rounds: int
    tracked: tuple[int, ...]
    scrapes: int
    requests: int
    remembered: int
    periods: int


FULL = Size(30, (1_000, 10_000, 100_000), 15, requests=2_000, remembered=5_000, periods=5)
QUICK = Size(2, (1_000, 3_000), 3, requests=100, remembered=1_000, periods=1)


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
    """

    what: str
    most: float
    measured: float | None

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table of targets."""
        met = "not measured"
        if self.measured is not None:
            met = "met" if self.measured <= self.most else "**not met**"
        return (self.what, f"≤ {self.most:.3g}", number(self.measured, 3), met)


@dataclass(frozen=True)
class Result:
    """What a benchmark measured.

    Attributes:
        table: The measurements, if there are any.
        is_of_page: Whether the report has them.
        ratios: The ratios that have a target.
    """

    table: Table | None = None
    is_of_page: bool = True
    ratios: Sequence[Ratio] = ()


def targets(ratios: Sequence[Ratio]) -> Table:
    """The table of targets."""
    columns = ("ratio of A to B", "target", "A divided by B", "result")
    return Table("Targets", columns, [each.cells for each in ratios])


def divided(part: float | None, whole: float | None) -> float | None:
    """A quotient; `None` where one of both is not known."""
    return None if part is None or not whole else part / whole


def number(value: float | None, digits: int = 2) -> str:
    """A number as a cell."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


@contextmanager
def required() -> Iterator[None]:
    """Raises what the tests' servers raise where a program or a package is missing.

    Raises:
        LookupError: It is missing.
    """
    try:
        yield
    except (ModuleNotFoundError, KeyError, pytest.skip.Exception, pytest.fail.Exception) as error:
        raise LookupError(str(error)) from error

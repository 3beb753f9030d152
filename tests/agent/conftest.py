"""Fixtures for tests through real agents, and the axes along which a test may be repeated."""

from collections.abc import AsyncIterator
from itertools import permutations
from pathlib import Path
from typing import Literal, TypeVar

import pytest
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

Form = Literal["sync", "async"]
Order = tuple[int, ...]
Item = TypeVar("Item")

both_forms = pytest.mark.parametrize("form", ["sync", "async"])
"""The hooks of `invoke` and those of `ainvoke`, as the argument `form`.

Only where the form itself can change the result: two methods with a body each (`reset` and
`areset`), functions and observers that are awaited or not, overrides of one form, threads,
blocking, cancellation, context variables. All else is proved once, in the async form:
`test_forms.py` plays random agents in both and finds no difference.
"""


def orders(count: int) -> pytest.MarkDecorator:
    """Every order of so many middlewares, as the argument `order`.

    Only where two of them act at the same hook, and so can see each other's work. What wraps a
    call stands beside what judges before or after it, in any order.
    """
    return pytest.mark.parametrize("order", list(permutations(range(count))), ids=str)


def in_order(order: Order, *items: Item) -> list[Item]:
    return [items[index] for index in order]


@pytest.fixture
async def sqlite_saver(tmp_path: Path) -> AsyncIterator[AsyncSqliteSaver]:
    """A checkpointer on a database of the test's own."""
    async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "threads.sqlite")) as saver:
        yield saver

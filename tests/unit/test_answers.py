"""Answers to questions at limits, as interfaces send them."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from langchain_quota.decision import Unit
from langchain_quota.middleware._answers import ACTION, read_answer

OFFERED = {"tool:search": 3, "all": 1}
UNITS: Mapping[str, Unit] = {"tool:search": "calls", "all": "calls"}


def approved(amount: object) -> dict[str, Any]:
    """An approval with an amount."""
    return {"decisions": [{"type": "approve", "amount": amount}]}


@pytest.mark.parametrize(
    ("unit", "amount", "problem"),
    [
        ("calls", "", "\"amount\" must be a whole number or None, not ''"),
        ("calls", 10**15 + 1, '"amount" must be at most 1000000000000000, not 1000000000000001'),
        ("calls", -1, '"amount" must be 0 or more, not -1'),
        ("calls", True, "not True"),
        ("microdollars", 1.5, "write it as a string"),
        ("microdollars", "$1", 'dollars in digits, such as "0.50"'),
        ("microdollars", "0.0000001", "at most six decimal places"),
        ("microdollars", 10**9 + 1, "must be from 0 to"),
    ],
)
def test_amounts_that_are_none(unit: Unit, amount: object, problem: str) -> None:
    """What no store can grant is no answer: an answer that failed later could not be replaced."""
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_answer(approved(amount), {"limit": 1}, {"limit": unit})


@pytest.mark.parametrize(
    "resumed",
    [
        "yes",
        None,
        {"decisions": []},
        {"decisions": [{"type": "approve"}, {"type": "approve"}]},
        {"decisions": [{"type": "respond", "message": "Yes."}]},
        {"decisions": [{"type": "edit", "edited_action": {"name": ACTION, "args": OFFERED}}]},
        {"decisions": {"type": "approve"}},
        [{"type": "approve"}],
        {"decisions": ["approve"]},
    ],
)
def test_what_is_no_answer(resumed: object) -> None:
    """Whatever a run is resumed with, only what says what to do is an answer."""
    with pytest.raises(ValueError, match=re.escape('it must be {"decisions"')):
        read_answer(resumed, OFFERED, UNITS)

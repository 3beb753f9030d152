"""Answers to questions at limits, as interfaces send them."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from langchain_quota import Answer, CostLimit, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.middleware._answers import ACTION, read_answer

OFFERED = {"tool:search": 3, "cost": 2_500_000}
LIMITS: Mapping[str, Limit] = {
    "tool:search": ToolCallLimit("search", run_limit=3, exit_behavior="ask"),
    "cost": CostLimit(run_limit="2.50", exit_behavior="ask"),
}


def edited(args: object) -> dict[str, Any]:
    """An answer with other amounts."""
    edit = {"type": "edit", "edited_action": {"name": ACTION, "args": args}}
    return {"decisions": [edit]}


@pytest.mark.parametrize(
    ("args", "granted"),
    [
        ({"tool:search": "5", "cost": "0.10"}, {"tool:search": 5, "cost": 100_000}),
        ({"tool:search": " 1,000\n"}, {"tool:search": 1000}),
        ({"cost": "$1,000.5"}, {"cost": 1_000_500_000}),
        ({"tool:search": 0, "cost": 1.5}, {"tool:search": 0, "cost": 1_500_000}),
        ({"tool:search": 10**15, "cost": 10**9}, {"tool:search": 10**15, "cost": 10**15}),
        ({}, {}),
    ],
)
def test_edited_amounts(args: object, granted: Mapping[str, int]) -> None:
    """Forms give a number that is edited as text, and one that is not as it was."""
    assert read_answer(edited(args), OFFERED, LIMITS).granted == granted


def test_an_edit_of_a_limit_with_room_again() -> None:
    """An edit answers the question that was asked, and grants what is still missing."""
    answer = read_answer(edited({"tool:search": 2, "cost": "1"}), {"cost": 2_500_000}, LIMITS)
    assert answer.granted == {"cost": 1_000_000}


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"tool:search": ""}, "limit 'tool:search' must be calls from 0"),
        ({"tool:search": 10**15 + 1}, "not 1000000000000001"),
        ({"tool:search": -1}, "not -1"),
        ({"tool:search": True}, "not True"),
        ({"tool:search": None}, "not None"),
        ({"tool:search": "9" * 5000}, "must be calls"),
        ({"cost": "0.0000001"}, "limit 'cost' must be dollars from 0"),
        ({"cost": float("nan")}, "not nan"),
        ({"tool:other": 1}, "amounts for 'tool:search', 'cost'"),
        ([], "amounts for 'tool:search', 'cost'"),
    ],
)
def test_amounts_that_are_none(args: object, problem: str) -> None:
    """What no store can grant is no answer: an answer that failed later could not be replaced."""
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_answer(edited(args), OFFERED, LIMITS)


@pytest.mark.parametrize(
    "resumed",
    [
        "yes",
        None,
        {"decisions": []},
        {"decisions": [{"type": "approve"}, {"type": "approve"}]},
        {"decisions": [{"type": "respond", "message": "Yes."}]},
        {"decisions": {"type": "approve"}},
        [{"type": "approve"}],
        {"decisions": ["approve"]},
    ],
)
def test_what_is_no_answer(resumed: object) -> None:
    """Whatever a run is resumed with, only what says what to do is an answer."""
    with pytest.raises(ValueError, match=re.escape('it must be {"decisions"')):
        read_answer(resumed, OFFERED, LIMITS)


def test_answers_of_agent_inbox() -> None:
    """Agent Inbox has other names for what an answer says, and the question's in an approval."""
    args = {"tool:search": "5", "cost": "2.50"}
    action = {"action": ACTION, "args": args}
    for decision, answer in (
        ({"type": "approve", "args": action}, Answer("approve", OFFERED)),
        ({"type": "edit", "args": action}, Answer("edit", {**OFFERED, "tool:search": 5})),
        ({"type": "reject", "args": "Not today."}, Answer("reject", message="Not today.")),
    ):
        assert read_answer({"decisions": [decision]}, OFFERED, LIMITS) == answer

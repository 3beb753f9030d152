"""Which calls a limit counts, and which limits share a count."""

from itertools import permutations
from typing import Any

import pytest

from langchain_quota import ModelCallLimit, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call

TOOLS = ("search", "calc", "fetch", "model")


@pytest.mark.parametrize(
    ("limit", "matching", "name"),
    [
        (ToolCallLimit("search", run_limit=1), ["search"], "tool:search"),
        (ToolCallLimit(["search", "calc"], run_limit=1), ["search", "calc"], "tool:calc,search"),
        (ToolCallLimit("model", run_limit=1), ["model"], "tool:model"),
        (ToolCallLimit(run_limit=1), [*TOOLS], "tool:*"),
        (ToolCallLimit(exclude=["fetch", "x"], run_limit=1), ["search", "calc", "model"], None),
        (ToolCallLimit(exclude=("fetch", "calc"), run_limit=1), None, "tool:*-calc,fetch"),
        (ModelCallLimit(run_limit=1), [None], "model"),
    ],
)
def test_a_limit_matches_what_it_names(limit: Limit, matching: Any, name: str | None) -> None:
    """A tool's limit matches that tool, one without a name all but the excluded; so it is named."""
    calls = [*(Call("tool", tool) for tool in TOOLS), Call("model")]
    assert matching in (None, [call.tool for call in calls if limit.matches(call)])
    assert name in (None, limit.name)


def test_limits_share_a_count_exactly_if_they_match_the_same_calls() -> None:
    """Whatever tools are called, and however often they are named."""
    names = ("search", "calc", "calc-search", "model", "-")
    some = [each for length in (1, 2) for each in permutations(names, length)]
    limits: list[Limit] = [
        *(ToolCallLimit(tools, run_limit=1) for tools in some),
        *(ToolCallLimit((*tools, tools[0]), run_limit=1) for tools in some),
        *(ToolCallLimit(exclude=tools, run_limit=1) for tools in [(), *some]),
        ModelCallLimit(run_limit=1),
    ]
    calls = [Call("model"), *(Call("tool", tool) for tool in (*names, "other"))]
    matched = {limit: tuple(map(limit.matches, calls)) for limit in limits}
    groups = len(set(matched.values()))
    assert len({(found, limit.kind, limit.counter) for limit, found in matched.items()}) == groups
    assert len({(limit.kind, limit.counter) for limit in limits}) == groups

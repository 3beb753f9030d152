"""The graph nodes of a `QuotaMiddleware`: it has only those that its limits need."""

import copy
from collections.abc import Sequence
from inspect import signature
from typing import Any

import pytest

from langchain_quota import (
    ConcurrencyLimit,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    RepeatLimit,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.stores.memory import MemoryStore
from tests.scene import Scene
from tests.telemetry import Signals

SEARCH = ToolCallLimit("search", run_limit=9)
MODEL = ModelCallLimit(run_limit=9)
BEFORE, AFTER, BOTH = ["before_model"], ["after_model"], ["before_model", "after_model"]


class OwnQuota(QuotaMiddleware[Any, Any]):
    """A user's subclass, which may override any hook."""


def nodes(signals: Signals, middleware: QuotaMiddleware[Any, Any]) -> list[str]:
    """The nodes that a middleware has in a step of the model."""
    own = f"{middleware.name}."
    found = [node for node in Scene(signals, [], [middleware]).agent.nodes if node.startswith(own)]
    return [node.removeprefix(own) for node in found if not node.endswith("before_agent")]


@pytest.mark.parametrize(
    ("limits", "cls", "expected"),
    [
        ([SEARCH], QuotaMiddleware, AFTER),
        ([SEARCH, RepeatLimit(3)], QuotaMiddleware, AFTER),
        ([ConcurrencyLimit("search", at_once=2)], QuotaMiddleware, AFTER),
        ([ToolCallLimit("search", quotas=[Quota(9, per="global")])], QuotaMiddleware, AFTER),
        ([SEARCH, MODEL], QuotaMiddleware, BOTH),
        ([TokenLimit(run_limit=9)], QuotaMiddleware, BOTH),
        ([MODEL], QuotaMiddleware, BEFORE),
        ([ModelCallLimit(run_limit=9, exit_behavior="finalize")], QuotaMiddleware, BOTH),
        ([SEARCH], OwnQuota, BOTH),
    ],
    ids=[
        *(
            "tools",
            "repeats",
            "at once",
            "quotas",
            "model and tools",
            "tokens",
            "model",
            "finalize",
        ),
        "a subclass",
    ],
)
def test_only_what_the_limits_need(
    limits: Sequence[Limit], cls: Any, expected: list[str], signals: Signals
) -> None:
    """A node is there for limits that need it, and for subclasses."""
    quota = cls(limits, store=MemoryStore(), telemetry=signals.telemetry)
    for each in (quota, copy.deepcopy(quota)):
        assert nodes(signals, each) == expected
        assert each.name == type(each).__name__ == cls.__name__


@pytest.mark.parametrize("cls", [QuotaMiddleware, OwnQuota])
@pytest.mark.parametrize(
    ("limit", "expected"),
    [(SEARCH, ["check_quota tool search"]), (MODEL, ["check_quota model"] * 2)],
    ids=["tools", "model"],
)
async def test_only_the_kinds_that_are_limited(
    limit: Limit, expected: list[str], cls: Any, signals: Signals
) -> None:
    """Calls of a kind on which there is no limit are not judged."""
    scene = Scene(signals, [["search"], "done"], [cls([limit], telemetry=signals.telemetry)])
    await scene.play()
    assert [span.name for span in signals.spans()] == expected


def test_the_signature_is_worked_out_once() -> None:
    """LangSmith asks for it at every call: a hook has it ready, also that of a copy."""
    quota = QuotaMiddleware([SEARCH])
    for each in (quota, copy.deepcopy(quota)):
        found = signature(each.awrap_model_call)
        assert [*found.parameters] == ["request", "handler"]
        assert signature(each.awrap_model_call) is found

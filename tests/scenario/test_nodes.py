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
from tests.scene import Form, Scene, both_forms
from tests.telemetry import Signals
from tests.tokens import RETRY

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


@both_forms
async def test_model_calls_without_a_node_are_seen(form: Form, signals: Signals) -> None:
    """Each has its span, in its place among the others."""
    scene = Scene(signals, [["search"], "done"], [SEARCH], form=form)
    await scene.play()
    spans = signals.spans()
    names = [span.name for span in spans]
    assert names == ["check_quota model", "check_quota tool search", "check_quota model"]
    assert scene.calls("allowed") == 2


@pytest.mark.parametrize("cls", [QuotaMiddleware, OwnQuota])
@pytest.mark.parametrize(("limit", "tools"), [(SEARCH, 1), (MODEL, 0)])
async def test_only_the_kinds_that_are_limited(
    limit: Limit, tools: int, cls: Any, signals: Signals
) -> None:
    """Model calls are always counted, and once; tool calls only if a limit is on tools."""
    scene = Scene(signals, [["search"], "done"], [cls([limit], telemetry=signals.telemetry)])
    await scene.play()
    names = sorted(span.name for span in signals.spans())
    assert names == ["check_quota model"] * 2 + ["check_quota tool search"] * tools


async def test_a_model_call_that_is_tried_again_is_seen_once(signals: Signals) -> None:
    """A middleware in front tries a model call again: it is one decision, as with a node."""
    scene = Scene(signals, [ConnectionError("gone"), "done"], [RETRY, SEARCH])
    await scene.play()
    assert len(scene.model.calls) == 2
    assert scene.calls("allowed") == 1


def test_the_signature_is_worked_out_once() -> None:
    """LangSmith asks for it at every call: a hook has it ready, also that of a copy."""
    quota = QuotaMiddleware([SEARCH])
    for each in (quota, copy.deepcopy(quota)):
        found = signature(each.awrap_model_call)
        assert [*found.parameters] == ["request", "handler"]
        assert signature(each.awrap_model_call) is found

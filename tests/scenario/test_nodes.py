"""The graph nodes of a `QuotaMiddleware`: it has none before the model if no limit needs it."""

import copy
from collections.abc import Sequence
from inspect import signature
from typing import Any

import pytest

from langchain_quota import (
    Limit,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    RepeatLimit,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.stores.memory import MemoryStore
from tests.scene import Form, Scene, both_forms
from tests.telemetry import Signals
from tests.tokens import RETRY

SEARCH = ToolCallLimit("search", run_limit=9)
MODEL = ModelCallLimit(run_limit=9)


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
        ([SEARCH], QuotaMiddleware, 1),
        ([SEARCH, RepeatLimit(3)], QuotaMiddleware, 1),
        ([ToolCallLimit("search", run_limit=9, at_once=2)], QuotaMiddleware, 1),
        ([ToolCallLimit("search", quotas=[Quota(9, per="global")])], QuotaMiddleware, 1),
        ([SEARCH, MODEL], QuotaMiddleware, 2),
        ([SEARCH, TokenLimit(run_limit=9)], QuotaMiddleware, 2),
        ([SEARCH], OwnQuota, 2),
    ],
    ids=["tools", "repeats", "at once", "quotas", "model", "tokens", "a subclass"],
)
def test_only_what_the_limits_need(
    limits: Sequence[Limit], cls: Any, expected: int, signals: Signals
) -> None:
    """A node before the model is there for limits on model calls or tokens, and for subclasses."""
    quota = cls(limits, store=MemoryStore(), telemetry=signals.telemetry)
    for each in (quota, copy.deepcopy(quota)):
        assert nodes(signals, each) == ["before_model", "after_model"][-expected:]
        assert each.name == type(each).__name__ == cls.__name__


@both_forms
async def test_a_run_without_an_active_span_is_one_trace(form: Form, signals: Signals) -> None:
    """Model calls without a node are seen, and the first one begins the run's trace."""
    scene = Scene(signals, [["search"], "done"], [SEARCH], form=form)
    await scene.play()
    spans = signals.spans()
    names = [span.name for span in spans]
    assert names == ["check_quota model", "check_quota tool search", "check_quota model"]
    assert len({span.context.trace_id for span in spans if span.context}) == 1
    assert scene.calls("allowed") == 2


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

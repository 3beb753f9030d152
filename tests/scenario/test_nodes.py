"""The graph nodes of a `QuotaMiddleware`: it has only those that its limits need."""

import copy
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware, hook_config

from langchain_quota import (
    ConcurrencyLimit,
    InlineQuotaMiddleware,
    ModelCallLimit,
    ModelCallLimitMiddleware,
    Quota,
    QuotaMiddleware,
    RepeatLimit,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitMiddleware,
)
from langchain_quota.limits import Limit
from langchain_quota.stores.memory import MemoryStore
from tests.scene import Form, Scene, both_forms
from tests.telemetry import Signals, needs_inline

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
        ([ConcurrencyLimit("search", max_concurrency=2)], QuotaMiddleware, AFTER),
        ([ToolCallLimit("search", quotas=[Quota(9, per="global")])], QuotaMiddleware, AFTER),
        ([SEARCH, MODEL], QuotaMiddleware, BOTH),
        ([TokenLimit(run_limit=9)], QuotaMiddleware, BOTH),
        ([MODEL], QuotaMiddleware, BEFORE),
        ([ModelCallLimit(run_limit=9, exit_behavior="finalize")], QuotaMiddleware, BOTH),
        ([SEARCH], OwnQuota, [*BOTH, "after_agent"]),
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
)
async def test_only_the_kinds_that_are_limited(
    limit: Limit, expected: list[str], cls: Any, signals: Signals
) -> None:
    """Calls of a kind on which there is no limit are not checked."""
    scene = Scene(signals, [["search"], "done"], [cls([limit], telemetry=signals.telemetry)])
    await scene.play()
    assert [span.name for span in signals.spans()] == expected


@pytest.mark.parametrize(
    ("limits", "options", "installed"),
    [
        ([MODEL], {"store": MemoryStore()}, ()),
        ([MODEL], {"tell_model": True}, ()),
        ([MODEL], {}, ("this",)),
        ([MODEL, ToolCallLimit(run_limit=9)], {}, ()),
        ([TokenLimit(run_limit=9)], {}, ()),
        ([MODEL], {}, ()),
    ],
)
async def test_around_the_model_only_if_needed(
    *, limits: Any, options: Any, installed: Any, signals: Signals, monkeypatch: Any
) -> None:
    """Model calls are wrapped for features and packages not yet imported, not for labels."""
    monkeypatch.setattr("langchain_quota.features.setup_checks._PACKAGES", installed)
    quota = QuotaMiddleware(limits, telemetry=signals.telemetry, **options)
    is_needed = bool(options or installed or isinstance(limits[0], TokenLimit))
    for hook in ("wrap_model_call", "awrap_model_call"):
        assert (getattr(type(quota), hook) is not getattr(AgentMiddleware, hook)) is is_needed
    await Scene(signals, ["done"], [quota]).play()
    assert "this" not in sys.modules
    assert [span.name for span in signals.spans()] == ["check_quota model"]


HOOKS = ("before_model", "abefore_model", "after_model", "aafter_model")
MARK: Any = hook_config(can_jump_to=["end"])
UNMARKED: Any = hook_config()


def override(cls: Any, *hooks: str, mark: Any = MARK) -> Any:
    """A subclass whose hooks call those of its base, and have a mark."""

    def calling(hook: str) -> Any:
        def called(self: Any, state: Any, runtime: Any) -> Any:
            return getattr(cls, hook)(self, state, runtime)

        async def acalled(self: Any, state: Any, runtime: Any) -> Any:
            return await getattr(cls, hook)(self, state, runtime)

        return mark(acalled if hook.startswith("aa") or hook == "abefore_model" else called)

    return type("Own", (cls,), {hook: calling(hook) for hook in hooks})


@pytest.mark.parametrize(
    ("cls", "hook"),
    [
        *((QuotaMiddleware, hook) for hook in HOOKS),
        *((ModelCallLimitMiddleware, hook) for hook in HOOKS[:2]),
        *((ToolCallLimitMiddleware, hook) for hook in HOOKS[2:]),
    ],
)
def test_a_hook_that_cannot_end_a_run(cls: Any, hook: str) -> None:
    """An override from which LangChain would drop the jump fails when the class is made."""
    line = '@hook_config(can_jump_to=["end"])'
    said = rf"Own\.{hook} could not end a run.* write {re.escape(line)} above it"
    for mark in (UNMARKED, hook_config(can_jump_to=["model"])):
        for base in (cls, override(cls, hook)):
            with pytest.raises(TypeError, match=said):
                override(base, hook, mark=mark)
    mixin = type("Mixin", (), {hook: print})
    with pytest.raises(TypeError, match=said):
        type("Own", (mixin, cls), {})


@both_forms
@pytest.mark.parametrize(
    ("base", "mark"),
    # The inline one's hooks are no nodes, and end nothing.
    [(QuotaMiddleware, MARK), pytest.param(InlineQuotaMiddleware, UNMARKED, marks=needs_inline)],
)
async def test_a_subclass_holds(base: Any, mark: Any, form: Form, signals: Signals) -> None:
    """A subclass that overrides all hooks ends a run as its base does."""
    limits = [ToolCallLimit("search", run_limit=2, exit_behavior="end"), MODEL]
    quota = override(base, *HOOKS, mark=mark)(limits, telemetry=signals.telemetry)
    scene = await Scene(signals, lambda _: ["search"], [quota], form=form).played()
    assert scene.ran == ["search"] * 2
    scene.check()


def test_hooks_that_end_nothing(signals: Signals) -> None:
    """Where a drop-in's hook never jumps, an override needs no mark."""
    cls = override(ModelCallLimitMiddleware, "after_model", mark=UNMARKED)
    assert "Own.after_model" in Scene(signals, [], [cls(run_limit=1)]).agent.nodes

"""The nodes that a `QuotaMiddleware` has, and where the inline one means something else."""

import copy
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware, hook_config

from langchain_quota import (
    ConcurrencyLimit,
    InlineQuotaMiddleware,
    MemoryStore,
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
from tests.scene import Form, Kind, Scene, asking, both_forms, either
from tests.telemetry import Signals, needs_inline, paid

SEARCH = ToolCallLimit("search", run_limit=9)
TOOLS = ToolCallLimit(run_limit=9)
MODEL = ModelCallLimit(run_limit=9)
ENDS: Any = {"exit_behavior": "end"}
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
    ("make", "is_wrapped"),
    [
        (partial(QuotaMiddleware, [MODEL], store=MemoryStore()), True),
        (partial(QuotaMiddleware, [TOOLS], store=MemoryStore()), False),
        (partial(QuotaMiddleware, [MODEL], tell_model=True), True),
        (partial(QuotaMiddleware, [TokenLimit(run_limit=9)]), True),
        (partial(QuotaMiddleware, [MODEL]), False),
        # Where limits on tools end no run, nothing is led back.
        (partial(QuotaMiddleware, [MODEL, TOOLS]), False),
        (partial(QuotaMiddleware, [ToolCallLimit("search", run_limit=9)]), False),
        (partial(QuotaMiddleware, [replace(TOOLS, **ENDS, enforce=False)]), False),
        (partial(QuotaMiddleware, [replace(TOOLS, **ENDS)]), True),
        (partial(QuotaMiddleware, [replace(TOOLS, give_up_after=2)]), True),
        (partial(ToolCallLimitMiddleware, run_limit=9), False),
        (partial(ToolCallLimitMiddleware, run_limit=9, **ENDS), True),
    ],
)
async def test_around_the_model_only_if_needed(
    *, make: Any, is_wrapped: bool, signals: Signals, monkeypatch: Any
) -> None:
    """Model calls are wrapped for features and ends, not to look at the tools or for labels."""
    monkeypatch.setattr("langchain_quota.features.setup_checks._PACKAGES", ("this",))
    middleware = make(telemetry=signals.telemetry)
    for hook in ("wrap_model_call", "awrap_model_call"):
        is_base = getattr(type(middleware), hook) is getattr(AgentMiddleware, hook)
        assert is_base is not is_wrapped
    scene = await Scene(signals, ["done"], [middleware]).played()
    assert "this" not in sys.modules
    assert len(scene.model.calls) == 1


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


class Looking(AgentMiddleware[Any, Any, Any]):
    """Notes when its hooks run, and may die, once, in the model's step or behind it."""

    def __init__(self, dies_in: str = "") -> None:
        super().__init__()
        self.seen, self.dies_in = list[str](), dies_in

    def note(self, what: str) -> None:
        if self.dies_in == what:
            self.dies_in = ""
            raise ConnectionError("gone")
        self.seen.append(what)

    def before_model(self, state: Any, runtime: Any) -> None:
        self.note("before")

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        response = await handler(request)
        self.note("wrap")
        return response

    def after_model(self, state: Any, runtime: Any) -> None:
        self.note("after")


@either
async def test_hooks_of_others_run_around_a_refusal(kind: Kind, signals: Signals) -> None:
    """Hooks of a later middleware do not run for a refused model call; inline they do."""
    looking, limit = Looking(), ModelCallLimit(run_limit=0)
    scene = await Scene(signals, ["never"], [limit, looking], kind=kind).played()
    assert looking.seen == ([] if kind == "quota" else ["before", "after"])
    assert not scene.model.calls


@either
@pytest.mark.parametrize("stored", [False, True], ids=["in the state", "in a store"])
async def test_a_death_after_the_check(*, kind: Kind, stored: bool, signals: Signals) -> None:
    """What is checked is checked once; inline the model is called again, and a store keeps both."""
    limits: list[Limit] = [ToolCallLimit("search", thread_limit=9), ModelCallLimit(thread_limit=9)]
    dying = Looking("after" if kind == "quota" else "wrap")
    store = MemoryStore() if stored else None
    scene = Scene(signals, asking("search"), [dying, *limits], kind=kind, store=store)
    with pytest.raises(ConnectionError):
        await scene.play()
    await scene.go_on()
    again = kind == "inline"
    assert scene.ran == ["search"]
    assert len(scene.model.calls) == (3 if again else 2)
    assert scene.usage().tools["search"] == (2 if again and stored else 1)
    assert scene.usage().model == 2


@needs_inline
async def test_what_a_failed_call_has_used_ends_the_run(signals: Signals) -> None:
    """A run that goes on behind a failed call which used its budget up makes no other call."""
    items: list[Any] = [Looking("wrap"), TokenLimit(run_limit=50)]
    scene = Scene(signals, [paid(60)], items, kind="inline")
    with pytest.raises(ConnectionError):
        await scene.play()
    await scene.go_on()
    assert scene.last_text() == "Token limits exceeded: run limit (60/50 tokens)"
    assert len(scene.model.calls) == 1


@needs_inline
async def test_streamed_updates(signals: Signals) -> None:
    """What it writes streams with the model's own update: no node but that of the beginning."""
    limits: list[Limit] = [ToolCallLimit("search", run_limit=1), ModelCallLimit(run_limit=2)]
    scene = Scene(signals, [["search"] * 2, ["search"]], limits, kind="inline")
    streamed = await scene.updates({"messages": [("user", "hi")]})
    refused, ended = [each["model"] for each in streamed if "model" in each][:2]
    begins = "InlineQuotaMiddleware.before_agent"
    assert list(streamed[0]) == [begins]
    assert {node for each in streamed for node in each} == {begins, "model", "tools"}
    for update in (refused, ended):
        assert [each.type for each in update["messages"]] == ["ai", "tool"]
    assert refused["thread_tool_call_count"] == {"search": 1}
    scene.check()


@needs_inline
async def test_two_of_them(signals: Signals) -> None:
    """Two in one agent fail at the first model call, with what to do."""

    class Another(InlineQuotaMiddleware[Any, Any]):
        """The second one, under a name of its own."""

    limits = [ToolCallLimit("search", run_limit=1)]
    both = [each(limits, telemetry=signals.telemetry) for each in (InlineQuotaMiddleware, Another)]
    scene = Scene(signals, asking("search"), both)
    with pytest.raises(RuntimeError, match="put all limits into one InlineQuotaMiddleware"):
        await scene.play()
    assert (len(scene.model.calls), scene.ran) == (0, [])


@needs_inline
async def test_an_older_langchain(signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which LangChain it needs, before the model is called."""
    monkeypatch.setattr("langchain_quota.agents.inline._LANGCHAIN", (1, 3))
    scene = Scene(signals, ["never"], [ModelCallLimit(run_limit=1)], kind="inline")
    with pytest.raises(RuntimeError, match=r"needs langchain 1\.4 or newer: use QuotaMiddleware"):
        await scene.play()
    assert not scene.model.calls

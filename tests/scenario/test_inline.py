"""Where InlineQuotaMiddleware means something else than QuotaMiddleware: the table of the docs."""

from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware

from langchain_quota import (
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from tests.scene import Kind, Scene, asking
from tests.telemetry import Signals, needs_inline, paid

pytestmark = needs_inline

both = pytest.mark.parametrize("kind", ["quota", "inline"])


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


@both
async def test_hooks_of_others_run_around_a_refusal(kind: Kind, signals: Signals) -> None:
    """Hooks of a later middleware do not run for a refused model call; inline they do."""
    looking, limit = Looking(), ModelCallLimit(run_limit=0)
    scene = await Scene(signals, ["never"], [limit, looking], kind=kind).played()
    assert looking.seen == ([] if kind == "quota" else ["before", "after"])
    assert not scene.model.calls


@both
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


async def test_what_a_failed_call_has_used_ends_the_run(signals: Signals) -> None:
    """A run that goes on behind a failed call which used its budget up makes no other call."""
    items: list[Any] = [Looking("wrap"), TokenLimit(run_limit=50)]
    scene = Scene(signals, [paid(60)], items, kind="inline")
    with pytest.raises(ConnectionError):
        await scene.play()
    await scene.go_on()
    assert scene.last_text() == "Token limits exceeded: run limit (60/50 tokens)"
    assert len(scene.model.calls) == 1


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


async def test_an_older_langchain(signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which LangChain it needs, before the model is called."""
    monkeypatch.setattr("langchain_quota.agents.inline._LANGCHAIN", (1, 3))
    scene = Scene(signals, ["never"], [ModelCallLimit(run_limit=1)], kind="inline")
    with pytest.raises(RuntimeError, match=r"needs langchain 1\.4 or newer: use QuotaMiddleware"):
        await scene.play()
    assert not scene.model.calls

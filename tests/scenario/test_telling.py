"""What the model is told of its budget, and which tools it is offered: the requests themselves."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from langchain.agents.middleware import wrap_model_call
from langchain.agents.structured_output import AutoStrategy, ProviderStrategy, ToolStrategy
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    ToolCall,
    ToolMessage,
)
from pydantic import PrivateAttr

from langchain_quota import MemoryStore, ModelCallLimit, Quota, TokenLimit, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import ANN, VALID, Kind, Scene, Weather, either
from tests.telemetry import Signals, paid

NO_TOOLS = "No tool may be called now: every tool call will be refused."
THE_MODEL = ModelCallLimit(run_limit=1)
TOLD = "Budget: this is model call 1 of 1."
TELL: dict[str, Any] = {"tell_model": True}
HIDE: dict[str, Any] = {"hide_exhausted": True}


def notes(scene: Scene) -> list[str]:
    """What each request adds to its newest message."""
    return [each.messages[-1].text.partition("\n\n")[2] for each in scene.model.calls]


def offered(scene: Scene) -> list[tuple[str, ...]]:
    return [each.tools for each in scene.model.calls]


@either
async def test_quiet_until_near(kind: Kind, signals: Signals) -> None:
    """Nothing is said below the near share; then every limit, with its scarcest scope."""
    limits: list[Limit] = [
        ToolCallLimit("search", run_limit=3, thread_limit=9, near=0.6),
        ToolCallLimit(run_limit=6),
        ModelCallLimit(run_limit=10),
    ]
    script = [["calc"], ["search"], ["search"], "done", "done"]
    scene = await Scene(signals, script, limits, kind=kind, **TELL).played()
    await scene.play()
    near = "Budget: search: 1 of 3 left; all tools: 3 of 6 left; this is model call 4 of 10."
    assert notes(scene) == ["", "", "", near, ""]
    assert "Budget" not in str(scene.state())
    scene.check()


EVEN = Quota(1, per="user_id", window="1h", smooth=True)
"""What is left of it is no number to plan with."""


@pytest.mark.parametrize(
    ("limits", "batch", "note"),
    [
        ([ToolCallLimit(["search", "calc"], run_limit=1)], ["calc"], "calc, search: 0 of 1 left"),
        ([ToolCallLimit(exclude=["ask"], run_limit=1)], ["calc"], "all tools but ask: 0 of 1 left"),
        ([ToolCallLimit("calc", run_limit=lambda *_: 1)], ["calc"], "calc: 0 of 1 left"),
        ([ToolCallLimit("calc", run_limit=lambda *_: None)], ["calc"], None),
        ([ToolCallLimit("calc", thread_limit=5, run_limit=5)], ["calc"] * 4, "calc: 1 of 5 left"),
        ([ToolCallLimit("calc", run_limit=5, near=1.0)], ["calc"] * 4, None),
        (
            [ToolCallLimit("model", run_limit=5), ModelCallLimit(run_limit=9)],
            ["model"] * 4,
            "model: 1 of 5 left; this is model call 2 of 9",
        ),
        ([ToolCallLimit("calc", quotas=[Quota(1, per="user_id")])], ["calc"], "calc: 0 of 1 left"),
        ([ModelCallLimit(quotas=[Quota(2, per="user_id")])], ["calc"], "this is model call 2 of 2"),
        ([ToolCallLimit("calc", quotas=[EVEN])], ["calc"], None),
        ([TokenLimit(run_limit=100)], paid(90, "calc"), "tokens: 10 of 100 left"),
    ],
)
async def test_the_words_for_each_kind_of_limit(
    limits: list[Limit], batch: Any, note: str | None, signals: Signals
) -> None:
    """Tools, all but some, computed limits, quotas and budgets have their words."""
    tools = ("search", "calc", "ask", "model")
    store = MemoryStore() if limits[0].quotas or limits[0].kind == "model" else None
    scene = Scene(signals, [batch, "done"], limits, context=ANN, store=store, tools=tools, **TELL)
    await scene.play()
    assert notes(scene)[1] == ("" if note is None else f"Budget: {note}.")


IMAGE: dict[Any, Any] = {"type": "image", "url": "https://example.org/cat.png"}
NOTE: dict[Any, Any] = {"type": "text", "text": TOLD}
CALL = AIMessage("", tool_calls=[ToolCall(name="search", args={}, id="a")], id="m")


def answer(content: Any, **arguments: Any) -> ToolMessage:
    return ToolMessage(content, tool_call_id="a", id="t", **arguments)


@pytest.mark.parametrize(
    ("newest", "expected"),
    [
        (HumanMessage("How warm is it?", id="h", name="ann"), f"How warm is it?\n\n{TOLD}"),
        (HumanMessage("", id="h"), TOLD),
        (HumanMessage([IMAGE], id="h"), [IMAGE, NOTE]),
        (answer("12", name="search", artifact={"rows": 3}), f"12\n\n{TOLD}"),
        (answer([]), TOLD),
        (answer(["12"]), ["12", NOTE]),
        (AIMessage("hm"), None),
        (answer([{"type": "tool_result", "tool_use_id": "a", "content": "12"}]), None),
        (answer([{"type": "custom_tool_call_output", "output": "12"}]), None),
        (answer([{"type": "non_standard", "value": {"type": "computer_call_output"}}]), None),
        (answer("https://a.b", additional_kwargs={"type": "computer_call_output"}), None),
    ],
)
async def test_where_a_note_stands(newest: AnyMessage, expected: Any, signals: Signals) -> None:
    """It adds to the newest message, or stands behind it where that takes no text."""
    earlier: list[BaseMessage] = [HumanMessage("hi", id="first")]
    earlier += [CALL] if newest.type == "tool" else []
    scene = Scene(signals, ["done"], [THE_MODEL], **TELL)
    before = newest.model_dump(exclude={"id"})
    await scene.invoke({"messages": [*earlier, newest]})
    kept = scene.state()["messages"][:-1]
    assert kept[-1].model_dump(exclude={"id"}) == before
    sent = list(scene.model.calls[0].messages)
    if expected is None:
        assert (sent[:-1], sent[-1].type, sent[-1].content) == (kept, "human", TOLD)
    else:
        assert sent[:-1] == kept[:-1]
        assert sent[-1] == kept[-1].model_copy(update={"content": expected})


@either
async def test_exhausted_tools_are_hidden(kind: Kind, signals: Signals) -> None:
    """A tool with nothing left is not offered, by whichever limit; in a new run it is again."""
    limits = [
        ToolCallLimit("search", run_limit=1),
        ToolCallLimit(run_limit=3, exclude=["ask", "mail"]),
        ToolCallLimit("ask", quotas=[Quota(0, per="user_id")]),
    ]
    script = [["search"], ["calc"], ["calc"], "done", ["ask"], "done"]
    options = {"tools": ("search", "calc", "ask", "mail"), "context": ANN, **HIDE}
    scene = await Scene(signals, script, limits, kind=kind, store=MemoryStore(), **options).played()
    await scene.play()
    all_but_ask, only_mail = ("search", "calc", "mail"), ("mail",)
    few = ("calc", "mail")
    assert offered(scene) == [all_but_ask, few, few, only_mail, all_but_ask, all_but_ask]
    assert notes(scene) == [""] * 6
    assert scene.answers()[-1] == ("ask", "error")
    scene.check_requests()


class Choosing(ScriptedChatModel):
    """Records the tool choice of each request."""

    _choices: list[Any] = PrivateAttr(default_factory=list)

    def _next(self, messages: Sequence[BaseMessage], kwargs: dict[str, Any]) -> AIMessage:
        self._choices.append(kwargs.get("tool_choice"))
        return super()._next(messages, kwargs)


def by_openai(tool: str) -> Any:
    return {"type": "function", "function": {"name": tool}}


def by_anthropic(tool: str) -> Any:
    return {"type": "tool", "name": tool}


NO_SEARCH = ToolCallLimit("search", run_limit=0)


@pytest.mark.parametrize(
    ("limit", "choice", "sent"),
    [
        *((NO_SEARCH, each, [each]) for each in ("any", "required")),
        *((NO_SEARCH, each, [each]) for each in (by_openai("calc"), by_anthropic("calc"))),
        *((NO_SEARCH, each("search"), [None]) for each in (str, by_openai, by_anthropic)),
        *((ToolCallLimit(run_limit=0), each, [None]) for each in ("any", "search")),
        *((ToolCallLimit(run_limit=1), each, [each, None]) for each in ("any", "search")),
    ],
    ids=str,
)
async def test_the_tool_choice(limit: Limit, choice: Any, sent: Any, signals: Signals) -> None:
    """A tool choice stays if the rest can meet it; no hidden tool is demanded, and none of none."""

    @wrap_model_call
    async def chooses(request: Any, handler: Any) -> Any:
        return await handler(request.override(tool_choice=choice))

    model = Choosing(script=["done"] if len(sent) == 1 else [["search"], "done"])
    await Scene(signals, model, [chooses, limit], **HIDE).play()
    assert model._choices == sent


async def test_a_tool_of_the_provider_stays(signals: Signals) -> None:
    """What the provider runs is not ours to hide, even where no other tool is left."""
    tools: Any = ["search", "calc", {"type": "web_search"}]
    limit = ToolCallLimit(run_limit=1)
    scene = await Scene(signals, [["search"], "done"], [limit], tools=tools, **HIDE).played()
    assert offered(scene) == [("search", "calc", "web_search"), ("web_search",)]
    assert notes(scene) == ["", ""]


CAPABLE = partial(ScriptedChatModel, profile={"structured_output": True})


@either
@pytest.mark.parametrize(
    ("strategy", "model", "by_tool"),
    [
        (ToolStrategy, ScriptedChatModel, True),
        (AutoStrategy, ScriptedChatModel, True),
        (ProviderStrategy, CAPABLE, False),
        (AutoStrategy, CAPABLE, False),
    ],
    ids=["tool", "auto", "provider", "auto of the provider"],
)
async def test_structured_answers(
    *, strategy: Any, model: Any, by_tool: bool, kind: Kind, signals: Signals
) -> None:
    """With no tool left the answer can be given by its own tool; without one the tools stay."""
    last: Any = [VALID] if by_tool else '{"degrees": 20}'
    playing = model(script=[["search"], last])
    made: dict[str, Any] = {"response_format": strategy(Weather), **HIDE}
    scene = await Scene(signals, playing, [ToolCallLimit(run_limit=1)], kind=kind, **made).played()
    tools = ("search", "calc")
    assert offered(scene) == ([(*tools, "Weather"), ("Weather",)] if by_tool else [tools, tools])
    assert notes(scene) == ["", "" if by_tool else NO_TOOLS]
    assert scene.result["structured_response"] == Weather(degrees=20)

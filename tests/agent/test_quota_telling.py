"""What the model is told of its budget, and which tools it is offered: the requests themselves."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest
from langchain.agents.structured_output import AutoStrategy, ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, message_to_dict
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel, PrivateAttr

from langchain_quota import ModelCallLimit, QuotaMiddleware, ToolCallLimit
from langchain_quota.limit_options import ModelExitBehavior
from langchain_quota.limits import Limit
from langchain_quota.testing import ModelCall, ScriptedChatModel
from tests.agent.rules import CONFIG, Scene, recording
from tests.signals import Signals

WEB_SEARCH = {"type": "web_search"}
"""A tool that the provider runs."""

NO_TOOLS = "No tool may be called now: every tool call will be refused."


class Weather(BaseModel):
    """The weather."""

    degrees: int


def scene_of(
    signals: Signals,
    script: Any,
    *limits: Limit,
    tell_model: bool = False,
    hide_exhausted: bool = False,
    **options: Any,
) -> Scene:
    quota = QuotaMiddleware(
        limits, tell_model=tell_model, hide_exhausted=hide_exhausted, telemetry=signals.telemetry
    )
    return Scene(signals, script, [quota], **options)


def telling(signals: Signals, script: Any, *limits: Limit, **options: Any) -> Scene:
    return scene_of(signals, script, *limits, tell_model=True, **options)


def hiding(signals: Signals, script: Any, *limits: Limit, **options: Any) -> Scene:
    return scene_of(signals, script, *limits, hide_exhausted=True, **options)


def humans(messages: Sequence[BaseMessage]) -> list[str]:
    return [each.text for each in messages if isinstance(each, HumanMessage)]


def notes(calls: Sequence[ModelCall]) -> list[str]:
    """What each request adds to its newest message."""
    return [each.messages[-1].text.partition("\n\n")[2] for each in calls]


def offered(scene: Scene) -> list[tuple[str, ...]]:
    return [each.tools for each in scene.model.calls]


async def test_quiet_until_near(signals: Signals) -> None:
    """Nothing is said below the near share; then every limit, with its scarcest scope."""
    scene = telling(
        signals,
        [["calc"], ["search"], ["search"], "done"],
        ToolCallLimit("search", run_limit=3, thread_limit=9, near=0.6),
        ToolCallLimit(run_limit=6),
        ModelCallLimit(run_limit=10),
    )

    await scene.turn()

    assert notes(scene.model.calls) == [
        "",
        "",
        "",
        "Budget: search: 1 of 3 left; all tools: 3 of 6 left; this is model call 4 of 10.",
    ]
    scene.check()


async def test_never_in_the_history(signals: Signals) -> None:
    """The note is in the request only: neither the state nor an earlier message has it."""
    scene = telling(signals, [["search"], "done", "done"], ModelCallLimit(run_limit=2, near=0.1))

    await scene.turn("one")
    await scene.turn("two")

    assert "Budget" not in str(scene.state())
    assert [[each.text for each in call.messages] for call in scene.model.calls] == [
        ["one\n\nBudget: this is model call 1 of 2."],
        ["one", "", "search ran\n\nBudget: this is model call 2 of 2."],
        ["one", "", "search ran", "done", "two\n\nBudget: this is model call 1 of 2."],
    ]
    for call in scene.model.calls:
        kept = {each.id: each.type for each in scene.state()["messages"]}
        assert all(kept[each.id] == each.type for each in call.messages)


@pytest.mark.parametrize("ends", ["end", "finalize"])
async def test_what_a_provider_has_cached(ends: ModelExitBehavior, signals: Signals) -> None:
    """Each request begins with the whole request before it, but for its newest message.

    The notes are different in each, and the last one of `finalize` has its own.
    """
    steps = 10
    scene = telling(
        signals,
        lambda messages: ["search"] if len(messages) < 2 * steps else "done",
        ModelCallLimit(run_limit=steps, near=0.1, exit_behavior=ends),
        ToolCallLimit("search", run_limit=5),
        system_prompt="Be brief.",
    )

    await scene.turn()

    sent = [list(map(message_to_dict, each.messages)) for each in scene.model.calls]
    assert len(sent) == steps
    assert len(set(notes(scene.model.calls))) == steps
    for earlier, later in pairwise(sent):
        assert later[: len(earlier) - 1] == earlier[:-1]
        assert len(later) == len(earlier) + 2
    scene.check()


async def test_a_message_in_blocks(signals: Signals) -> None:
    """A human message made of blocks gets the note as a block of its own."""
    scene = telling(signals, ["done"], ModelCallLimit(run_limit=1))
    block = {"type": "text", "text": "hi"}

    await scene.invoke({"messages": [HumanMessage([dict(block)])]})

    told = {"type": "text", "text": "Budget: this is model call 1 of 1."}
    assert scene.model.calls[0].messages[0].content == [block, told]
    assert scene.state()["messages"][0].content == [block]


async def test_what_a_tool_answered_is_as_it_was(signals: Signals) -> None:
    """The newest of parallel answers takes the note, and keeps id, name, status and artifact."""

    def picture() -> tuple[list[Any], dict[str, int]]:
        return [{"type": "text", "text": "a cat"}], {"rows": 3}

    show = StructuredTool.from_function(
        picture, name="show", description="Show.", response_format="content_and_artifact"
    )
    limit = ToolCallLimit("search", run_limit=1)
    scene = telling(signals, [["search", "show"], "done"], limit, tools=("search", show))

    await scene.turn()

    *older, newest = scene.model.calls[1].messages
    *kept, answer = scene.state()["messages"][:4]
    assert older == kept
    assert answer.content == [{"type": "text", "text": "a cat"}]
    note = {"type": "text", "text": "Budget: search: 0 of 1 left."}
    assert newest == answer.model_copy(update={"content": [*answer.content, note]})
    assert answer.artifact == {"rows": 3}
    scene.check()


async def test_no_human_message(signals: Signals) -> None:
    """Where the model has spoken last the note is a message of its own, at the end."""
    scene = telling(signals, ["done"], ModelCallLimit(run_limit=1))

    await scene.invoke({"messages": [AIMessage("Hello!")]})

    request = scene.model.calls[0].messages
    assert [(each.type, each.text) for each in request] == [
        ("ai", "Hello!"),
        ("human", "Budget: this is model call 1 of 1."),
    ]
    assert humans(scene.state()["messages"]) == []


async def test_the_words_for_each_kind_of_limit(signals: Signals) -> None:
    """Several tools, all but some, and computed limits each have their words; no limit has none."""
    scene = telling(
        signals,
        ["done"],
        ToolCallLimit(["search", "calc"], thread_limit=7),
        ToolCallLimit(run_limit=4, exclude=["calc"]),
        ToolCallLimit("calc", run_limit=lambda state, runtime: 5),
        ToolCallLimit("search", run_limit=lambda state, runtime: None),
        ModelCallLimit(thread_limit=1),
    )

    await scene.turn()

    (note,) = notes(scene.model.calls)
    assert note.removeprefix("Budget: ").removesuffix(".").split("; ") == [
        "calc, search: 7 of 7 left",
        "all tools but calc: 4 of 4 left",
        "calc: 5 of 5 left",
        "this is model call 1 of 1",
    ]


async def test_a_new_run_is_quiet_again(signals: Signals) -> None:
    """A run that used up its limit is told so; the next run begins with a new budget."""
    scene = telling(
        signals,
        [["search"], "done", ["search"], "done"],
        ToolCallLimit("search", run_limit=1),
    )

    await scene.turn()
    await scene.turn()

    assert notes(scene.model.calls) == ["", "Budget: search: 0 of 1 left."] * 2


async def test_what_a_stream_shows(signals: Signals) -> None:
    """A streaming agent streams neither note nor changed message, and the model has the note."""
    scene = telling(signals, [["search"], "all done"], ModelCallLimit(run_limit=2, near=0.1))
    given: Any = {"messages": [("user", "hi")]}
    stream_mode = ["messages", "updates", "values"]

    stream = scene.agent.astream(given, CONFIG, stream_mode=stream_mode)
    events = [event async for event in stream]

    assert "Budget" not in str(events)
    assert len(notes(scene.model.calls)) == 2
    assert all(notes(scene.model.calls))


@pytest.mark.parametrize("options", [{}, {"hide_exhausted": True}], ids=str)
async def test_nothing_is_said_unasked(options: Any, signals: Signals) -> None:
    """Without `tell_model` no request has a note, however little is left."""
    scene = scene_of(
        signals,
        [["search"], "done"],
        ToolCallLimit("search", run_limit=1),
        ModelCallLimit(run_limit=2),
        **options,
    )

    await scene.turn()

    assert notes(scene.model.calls) == ["", ""]


async def test_exhausted_tools_are_hidden(signals: Signals) -> None:
    """A tool with nothing left is not offered, by whichever limit; in a new run it is again."""
    scene = hiding(
        signals,
        [["search"], ["calc"], ["calc"], "done", "done"],
        ToolCallLimit("search", run_limit=1),
        ToolCallLimit(run_limit=3, exclude=["ask"]),
        tools=("search", "calc", "ask"),
    )

    await scene.turn()
    await scene.turn()

    assert offered(scene) == [
        ("search", "calc", "ask"),
        ("calc", "ask"),
        ("calc", "ask"),
        ("ask",),
        ("search", "calc", "ask"),
    ]
    assert notes(scene.model.calls) == [""] * 5
    scene.check()


async def test_a_hidden_tool_that_is_called(signals: Signals) -> None:
    """A model that calls a tool which it was not offered is refused."""
    scene = hiding(signals, [["search"], "done"], ToolCallLimit("search", thread_limit=0))

    await scene.turn()

    assert offered(scene) == [("calc",), ("calc",)]
    assert scene.answers() == [("search", "error")]
    assert scene.ran == []
    scene.check()


async def test_without_hiding(signals: Signals) -> None:
    """Without `hide_exhausted` every tool is offered, and the model may be told all the same."""
    scene = telling(signals, [["search"], "done"], ToolCallLimit("search", thread_limit=0))

    await scene.turn()

    assert offered(scene) == [("search", "calc")] * 2
    assert notes(scene.model.calls) == ["Budget: search: 0 of 0 left."] * 2


async def test_nothing_left_in_a_new_history(signals: Signals) -> None:
    """Where the history has no tool calls an empty list is offered, with no note."""
    scene = hiding(signals, ["done"], ToolCallLimit(thread_limit=0))

    await scene.turn()

    assert offered(scene) == [()]
    assert notes(scene.model.calls) == [""]


async def test_nothing_left_after_tool_calls(signals: Signals) -> None:
    """Where the history has tool calls the tools stay, the note forbids them, calls are refused."""
    scene = hiding(signals, [["search"], ["calc"], "done"], ToolCallLimit(run_limit=1))

    await scene.turn()

    assert offered(scene) == [("search", "calc")] * 3
    assert notes(scene.model.calls) == ["", NO_TOOLS, NO_TOOLS]
    assert humans(scene.state()["messages"]) == ["hi"]
    assert scene.ran == ["search"]
    assert scene.answers() == [("search", "success"), ("calc", "error")]
    scene.check()


async def test_told_and_hidden(signals: Signals) -> None:
    """The two notes stand together, at one place."""
    scene = scene_of(
        signals,
        [["search"], "done"],
        ToolCallLimit(run_limit=1),
        tell_model=True,
        hide_exhausted=True,
    )

    await scene.turn()

    assert notes(scene.model.calls) == ["", f"Budget: all tools: 0 of 1 left. {NO_TOOLS}"]


class Choosing(ScriptedChatModel):
    """Records the tool choice of each request."""

    _choices: list[Any] = PrivateAttr(default_factory=list)

    def _next(self, messages: Sequence[BaseMessage], kwargs: dict[str, Any]) -> AIMessage:
        self._choices.append(kwargs.get("tool_choice"))
        return super()._next(messages, kwargs)


class Chooser(AgentMiddleware[Any, Any, Any]):
    """Asks for a tool choice in each request."""

    def __init__(self, choice: Any) -> None:
        super().__init__()
        self._choice = choice

    def wrap_model_call(self, request: ModelRequest[Any], handler: Any) -> Any:
        return handler(request.override(tool_choice=self._choice))

    async def awrap_model_call(self, request: ModelRequest[Any], handler: Any) -> Any:
        return await handler(request.override(tool_choice=self._choice))


async def play(
    signals: Signals,
    model: ScriptedChatModel,
    *limits: Limit,
    tools: Sequence[Any] = ("search", "calc"),
    before: Sequence[AgentMiddleware[Any, Any, Any]] = (),
    **options: Any,
) -> dict[str, Any]:
    """One run of an agent that hides exhausted tools, with a model of the test's own."""
    quota = QuotaMiddleware(limits, hide_exhausted=True, telemetry=signals.telemetry)
    agent: Any = create_agent(
        model,
        [recording(each, []) if isinstance(each, str) else each for each in tools],
        middleware=[*before, quota],
        checkpointer=InMemorySaver(),
        **options,
    )
    given = {"messages": [("user", "hi")]}
    return dict(await agent.ainvoke(given, CONFIG))


def named(tool: str) -> dict[str, Any]:
    """A tool choice in the form of OpenAI."""
    return {"type": "function", "function": {"name": tool}}


@pytest.mark.parametrize("choice", ["any", "auto", "calc", named("calc")], ids=str)
async def test_the_tool_choice_that_can_be_kept(choice: Any, signals: Signals) -> None:
    """With a tool hidden, a tool choice that the rest can meet stays as it was asked for."""
    model = Choosing(script=["done"])

    await play(signals, model, ToolCallLimit("search", run_limit=0), before=[Chooser(choice)])

    assert model.calls[0].tools == ("calc",)
    assert model._choices == [choice]


@pytest.mark.parametrize("choice", ["search", named("search")], ids=str)
async def test_the_tool_choice_of_a_hidden_tool(choice: Any, signals: Signals) -> None:
    """A tool choice that names a hidden tool is dropped: the provider would refuse it."""
    model = Choosing(script=["done"])

    await play(signals, model, ToolCallLimit("search", run_limit=0), before=[Chooser(choice)])

    assert model.calls[0].tools == ("calc",)
    assert model._choices == [None]


@pytest.mark.parametrize("choice", ["any", "search", named("search")], ids=str)
async def test_no_tool_choice_without_tools(choice: Any, signals: Signals) -> None:
    """Where no tool is offered, none is asked for."""
    model = Choosing(script=["done"])

    await play(signals, model, ToolCallLimit(run_limit=0), before=[Chooser(choice)])

    assert model.calls[0].tools == ()
    assert model._choices == [None]


@pytest.mark.parametrize("choice", ["any", "search", named("search")], ids=str)
async def test_no_tool_is_demanded_where_none_may_be_called(choice: Any, signals: Signals) -> None:
    """Where tools stay for the provider's sake only, the model is not made to call one."""
    model = Choosing(script=[["search"], "done"])

    await play(signals, model, ToolCallLimit(run_limit=1), before=[Chooser(choice)])

    assert [each.tools for each in model.calls] == [("search", "calc")] * 2
    assert notes(model.calls) == ["", NO_TOOLS]
    assert model._choices[0] == choice
    assert model._choices[1] in {None, "auto", "none"}


async def test_a_tool_of_the_provider_stays(signals: Signals) -> None:
    """What the provider runs is not ours to hide, even where no other tool is left."""
    model = ScriptedChatModel(script=[["search"], "done"])

    await play(signals, model, ToolCallLimit(run_limit=1), tools=["search", "calc", WEB_SEARCH])

    assert [each.tools for each in model.calls] == [
        ("search", "calc", "web_search"),
        ("web_search",),
    ]
    assert notes(model.calls) == ["", ""]


VALID = ("Weather", {"degrees": 20})


@pytest.mark.parametrize("strategy", [ToolStrategy, AutoStrategy])
async def test_the_tool_of_the_structured_answer_stays(strategy: Any, signals: Signals) -> None:
    """With no tool left the structured answer can still be given, and no note is needed."""
    model = ScriptedChatModel(script=[["search"], [VALID]])

    result = await play(
        signals, model, ToolCallLimit(run_limit=1), response_format=strategy(Weather)
    )

    assert [each.tools for each in model.calls] == [("search", "calc", "Weather"), ("Weather",)]
    assert notes(model.calls) == ["", ""]
    assert result["structured_response"] == Weather(degrees=20)


@pytest.mark.parametrize("strategy", [ProviderStrategy, AutoStrategy])
async def test_the_provider_gives_the_structured_answer(strategy: Any, signals: Signals) -> None:
    """If the answer is structured without a tool, an empty list of tools is still handled."""
    model = ScriptedChatModel(
        script=[["search"], '{"degrees": 20}'], profile={"structured_output": True}
    )

    result = await play(
        signals, model, ToolCallLimit(run_limit=1), response_format=strategy(Weather)
    )

    assert [each.tools for each in model.calls] == [("search", "calc")] * 2
    assert notes(model.calls) == ["", NO_TOOLS]
    assert result["structured_response"] == Weather(degrees=20)


class NamedModel(ScriptedChatModel):
    """A model that LangChain knows by its name to structure answers itself."""

    model_name: str = "gpt-4.1"


async def test_a_provider_known_by_name(signals: Signals) -> None:
    """A model without a profile that LangChain knows by name is cared for in the same way."""
    model = NamedModel(script=[["search"], '{"degrees": 20}'])

    result = await play(
        signals, model, ToolCallLimit(run_limit=1), response_format=AutoStrategy(Weather)
    )

    assert [each.tools for each in model.calls] == [("search", "calc")] * 2
    assert result["structured_response"] == Weather(degrees=20)

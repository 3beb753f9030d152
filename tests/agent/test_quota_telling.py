"""What the model is told of its budget, and which tools it is offered: the requests themselves."""

from collections.abc import Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest
from langchain.agents.structured_output import AutoStrategy, ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel, PrivateAttr

from langchain_quota import ModelCallLimit, QuotaMiddleware, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.testing import ModelCall, ScriptedChatModel
from tests.scene import CONFIG, Scene, recording
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

    await scene.play()

    assert notes(scene.model.calls) == [
        "",
        "",
        "",
        "Budget: search: 1 of 3 left; all tools: 3 of 6 left; this is model call 4 of 10.",
    ]
    scene.check()


async def test_a_message_in_blocks(signals: Signals) -> None:
    """A human message made of blocks gets the note as a block of its own."""
    scene = telling(signals, ["done"], ModelCallLimit(run_limit=1))
    block = {"type": "text", "text": "hi"}

    await scene.invoke({"messages": [HumanMessage([dict(block)])]})

    told = {"type": "text", "text": "Budget: this is model call 1 of 1."}
    assert scene.model.calls[0].messages[0].content == [block, told]
    assert scene.state()["messages"][0].content == [block]


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


@pytest.mark.parametrize("choice", ["search", named("search")], ids=str)
async def test_the_tool_choice_of_a_hidden_tool(choice: Any, signals: Signals) -> None:
    """A tool choice that names a hidden tool is dropped: the provider would refuse it."""
    model = Choosing(script=["done"])

    await play(signals, model, ToolCallLimit("search", run_limit=0), before=[Chooser(choice)])

    assert model.calls[0].tools == ("calc",)
    assert model._choices == [None]


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

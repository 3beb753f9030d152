"""What InlineQuotaMiddleware adds to a run: no step, and the telemetry of QuotaMiddleware."""

from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware

from langchain_quota import (
    InlineQuotaMiddleware,
    ModelCallLimit,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import CONFIG, Scene
from tests.signals import Signals, needs_inline

pytestmark = needs_inline

ASK: dict[str, Any] = {"messages": [("user", "hi")]}


def inline(signals: Signals, *limits: Limit, **options: Any) -> InlineQuotaMiddleware[Any, Any]:
    return InlineQuotaMiddleware(limits, telemetry=signals.telemetry, **options)


async def test_streamed_updates(signals: Signals) -> None:
    """What it writes streams with the model's own update: no node but that of the beginning."""
    limits: list[Limit] = [ToolCallLimit("search", run_limit=1), ModelCallLimit(run_limit=2)]
    scene = Scene(signals, [["search"] * 2, "never"], [inline(signals, *limits)])
    scene.model.script[1] = ["search"]

    streamed = await scene.updates(ASK)

    (refused, ended) = [each["model"] for each in streamed if "model" in each][:2]
    assert list(streamed[0]) == ["InlineQuotaMiddleware.before_agent"]
    assert {node for each in streamed for node in each} == {
        "InlineQuotaMiddleware.before_agent",
        "model",
        "tools",
    }
    assert [each.type for each in refused["messages"]] == ["ai", "tool"]
    assert [each.type for each in ended["messages"]] == ["ai", "tool"]
    assert refused["thread_tool_call_count"] == {"search": 1}
    scene.check()


async def test_streamed_tokens(signals: Signals) -> None:
    """The model's words stream as they come, and a refusal as a message."""
    limits: list[Limit] = [ModelCallLimit(run_limit=1), ToolCallLimit("search", run_limit=0)]
    scene = Scene(signals, [["search"]], [inline(signals, *limits)])
    assert await said_in_turn(scene) == [
        ("tool", "Tool call limit exceeded. Do not call 'search' again."),
        ("ai", "Model call limits exceeded: run limit (1/1)"),
    ]

    words = Scene(signals, ["one two three"], [inline(signals, *limits)])
    assert [text for _, text in await said_in_turn(words)] == ["one", " two", " three"]


async def said_in_turn(scene: Scene) -> list[tuple[str, str]]:
    """What a turn streams in the stream mode `messages`."""
    kinds = {"AIMessageChunk": "ai"}
    return [
        (kinds.get(message.type, message.type), str(message.content))
        async for message, _ in scene.agent.astream(ASK, CONFIG, stream_mode="messages")
        if message.content
    ]


class _Looking(AgentMiddleware[Any, Any]):
    """Notes when its hooks run."""

    seen: list[str]

    def before_model(self, state: Any, runtime: Any) -> None:
        self.seen.append("before")

    async def aafter_model(self, state: Any, runtime: Any) -> None:
        self.seen.append("after")


async def test_a_class_listed_behind_it_keeps_its_hooks() -> None:
    """What `InlineQuotaMiddleware` has no node for, another base class may have one for."""

    class Both(InlineQuotaMiddleware[Any, Any], _Looking):  # type: ignore[misc]  # no hook there
        pass

    middleware = Both([ModelCallLimit(run_limit=9)])
    middleware.seen = []
    model = ScriptedChatModel(script=["Hello."])
    agent: Any = create_agent(model, middleware=[middleware])
    await agent.ainvoke({"messages": [("user", "Hi!")]})
    assert middleware.seen == ["before", "after"]

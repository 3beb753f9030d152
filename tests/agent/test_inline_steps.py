"""What InlineQuotaMiddleware adds to a run: no step, and the telemetry of QuotaMiddleware."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.tools import StructuredTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError

from langchain_quota import (
    Decision,
    InlineQuotaMiddleware,
    ModelCallLimit,
    QuotaMiddleware,
    ToolCallLimit,
    usage,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.agent.conftest import Form, both_forms
from tests.agent.rules import CONFIG, Middleware, Scene
from tests.agent.test_quota import eight_limits
from tests.signals import Signals, needs_inline

pytestmark = needs_inline

ASK: dict[str, Any] = {"messages": [("user", "hi")]}
TOOLS = ("search", "calc", "ask")
LIMITS: dict[str, Callable[[], list[Limit]]] = {
    "1": lambda: [ToolCallLimit("search", run_limit=90)],
    "8": eight_limits,
}

many = pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())


def inline(signals: Signals, *limits: Limit, **options: Any) -> InlineQuotaMiddleware[Any, Any]:
    return InlineQuotaMiddleware(limits, telemetry=signals.telemetry, **options)


def both(signals: Signals, limits: list[Limit]) -> list[list[Middleware]]:
    return [[], [inline(signals, *limits)]]


@many
@pytest.mark.parametrize("steps", [1, 2, 5])
async def test_no_step_of_its_own(
    limits: Callable[[], list[Limit]], steps: int, signals: Signals
) -> None:
    """However many limits and steps: one superstep and one checkpoint a run."""
    counted = []
    for middleware in both(signals, limits()):
        script = [["search"]] * (steps - 1) + ["done"]
        scene = Scene(signals, script, middleware, tools=TOOLS)
        events = [each async for each in scene.agent.astream(ASK, CONFIG, stream_mode="debug")]
        supersteps = {each["step"] for each in events if each["type"] == "task"}
        checkpoints = list(scene.agent.get_state_history(CONFIG))
        counted.append((len(supersteps), len(checkpoints)))

    bare, limited = counted
    assert limited == (bare[0] + 1, bare[1] + 1)


@many
async def test_no_step_of_the_recursion_limit(
    limits: Callable[[], list[Limit]], signals: Signals
) -> None:
    """A run gets along with one more step than without limits, whatever its length."""

    async def suffices(middleware: list[Middleware], steps: int) -> bool:
        scene = Scene(signals, [["search"]] * 4 + ["done"], middleware)
        config: Any = {**CONFIG, "recursion_limit": steps}
        try:
            await scene.agent.ainvoke(ASK, config)
        except GraphRecursionError:
            return False
        return True

    needed = []
    for middleware in both(signals, limits()):
        steps = 1
        while not await suffices(middleware, steps):
            steps += 1
        needed.append(steps)

    assert needed[1] == needed[0] + 1


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


async def test_events(signals: Signals) -> None:
    """The events of a run tell of each model and tool call once, and of no hook of a step."""
    limits: list[Limit] = [ModelCallLimit(run_limit=9), ToolCallLimit("search", run_limit=1)]
    scene = Scene(signals, [["search"] * 2, "done"], [inline(signals, *limits)])

    events = [each async for each in scene.agent.astream_events(ASK, CONFIG, version="v2")]

    ends = [(each["event"], each["name"]) for each in events if each["event"].endswith("_end")]
    assert [name for event, name in ends if event == "on_tool_end"] == ["search"]
    assert sum(event == "on_chat_model_end" for event, _ in ends) == 2
    assert {name for _, name in ends if "before_" in name or "after_" in name} == {
        "InlineQuotaMiddleware.before_agent"
    }
    scene.check()


@pytest.mark.parametrize("back", [False, True], ids=["to inline", "to quota"])
async def test_swapping_with_quota_middleware(*, back: bool, signals: Signals) -> None:
    """A thread goes on with its counts when QuotaMiddleware becomes the inline one, and back."""
    classes: list[Any] = [QuotaMiddleware, InlineQuotaMiddleware]
    saver, ran = InMemorySaver(), list[str]()
    limits: list[Limit] = [ToolCallLimit("search", thread_limit=3), ModelCallLimit(thread_limit=9)]
    for cls in reversed(classes) if back else classes:
        scene = Scene(
            signals,
            [["search", "search"], "done"],
            [cls(limits, telemetry=signals.telemetry)],
            ran=ran,
            checkpointer=saver,
        )
        await scene.turn()

    assert ran == ["search"] * 3
    used = usage(scene.agent.get_state(CONFIG))
    assert (used.model, dict(used.tools)) == (4, {"search": 3})
    assert scene.metric("tool:search", "allowed") == 3
    scene.check_requests()


async def test_swapped_in_mid_run(signals: Signals) -> None:
    """A run that waits under QuotaMiddleware goes on under the inline one, in one budget."""
    saver, ran = InMemorySaver(), list[str]()
    limits: list[Limit] = [ToolCallLimit("search", run_limit=3), ModelCallLimit(run_limit=9)]
    options: dict[str, Any] = {"checkpointer": saver, "ran": ran}
    telemetry = signals.telemetry
    first = Scene(
        signals,
        [["search", "search"]],
        [QuotaMiddleware(limits, telemetry=telemetry)],
        interrupt_before=["tools"],
        **options,
    )
    await first.turn()
    second = Scene(signals, [["search"] * 2, "done"], [inline(signals, *limits)], **options)
    await second.go_on()

    assert ran == ["search"] * 3
    assert usage(second.agent.get_state(CONFIG)).run_model == 3


async def test_a_sub_agent(signals: Signals) -> None:
    """An agent inside a tool has a budget of its own for each call, and the outer one its own."""
    ran: list[str] = []

    @tool
    def look() -> str:
        """Look."""
        ran.append("look")
        return "seen"

    child: Any = create_agent(
        ScriptedChatModel(script=lambda messages: ["look"]),
        [look],
        name="child",
        middleware=[inline(signals, ModelCallLimit(run_limit=2), ToolCallLimit(run_limit=1))],
    )

    async def ask_child() -> str:
        """Ask."""
        result = await child.ainvoke(ASK)
        return str(result["messages"][-1].content)

    def ask_child_now() -> str:
        return str(child.invoke(ASK)["messages"][-1].content)

    research = StructuredTool.from_function(
        ask_child_now, ask_child, name="research", description="Research."
    )
    scene = Scene(
        signals,
        [["research"] * 2, ["research"], "done"],
        [inline(signals, ToolCallLimit("research", run_limit=2), ModelCallLimit(run_limit=9))],
        tools=[research],
        name="parent",
    )

    result = await scene.turn()

    assert ran == ["look"] * 2
    answers = [each for each in result["messages"] if each.type == "tool"]
    assert [each.status for each in answers] == ["success", "success", "error"]
    assert answers[0].content == "Model call limits exceeded: run limit (2/2)"
    calls = "langchain_quota_calls_total"
    labels = {"kind": "tool", "agent": "parent", "tool": "research"}
    assert signals.value(calls, **labels, decision="allowed") == 2
    assert signals.value(calls, **labels, decision="blocked") == 1
    inner = {"kind": "model", "agent": "child", "tool": "none"}
    assert signals.value(calls, **inner, decision="allowed") == 4


class Watching(InlineQuotaMiddleware[Any, Any]):
    """Looks at each model call, in both forms."""

    seen: list[str]

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        self.seen.append("sync")
        return super().wrap_model_call(request, handler)

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        self.seen.append("async")
        return await super().awrap_model_call(request, handler)


@both_forms
async def test_a_subclass(form: Form, signals: Signals) -> None:
    """A subclass that overrides both forms is called once a model call, and limits as before."""
    mine = Watching([ToolCallLimit("search", run_limit=1)], telemetry=signals.telemetry)
    mine.seen = []
    scene = Scene(signals, [["search"] * 2, "done"], [mine], form=form)

    await scene.turn()

    assert mine.seen == [form] * 2
    scene.check()


async def test_the_same_spans(signals: Signals) -> None:
    """Each call has one span, with the attributes and the trace that QuotaMiddleware gives it."""
    limits: list[Limit] = [
        ModelCallLimit(run_limit=2),
        ToolCallLimit("search", run_limit=1, exit_behavior="continue"),
        ToolCallLimit("calc", thread_limit=5, enforce=False),
    ]
    told = []
    for cls in (QuotaMiddleware, InlineQuotaMiddleware):
        signals.exporter.clear()
        seen: list[Decision] = []
        with captured_decisions() as decisions:
            middleware: Any = cls(limits, telemetry=signals.telemetry, on_decision=seen.append)
            scene = Scene(signals, [["search", "search", "calc"], ["calc"]], [middleware])
            await scene.turn()
        spans = signals.spans()
        assert len(spans) == len(decisions) == len(seen)
        traces = {each.context.trace_id for each in spans if each.context is not None}
        told.append(
            [(each.name, dict(each.attributes or {}), each.status.status_code) for each in spans]
        )
        assert len(traces) == 1
        signals.recorder.record_reset(None, "thread-1", [])

    quota, ours = told
    assert ours == quota
    assert [name for name, _, _ in ours].count("check_quota model") == 3


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

"""One scene for all tests: an agent or a graph that is held to limits, and what it did.

`Scene(signals, script, items, kind=…, form=…, store=…)` builds it; `play` is a new run. What it did
is `ran`, `answers()`, `used(limit)`, `metric(limit, decision)`; `check()` asserts the rules that
hold in every situation.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from inspect import isawaitable
from itertools import permutations
from typing import Any, Literal, Self, TypeVar

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent, tools_condition
from langgraph.types import Command
from pydantic import BaseModel

import langchain_quota
from langchain_quota import (
    Decision,
    MemoryStore,
    ModelCallLimitMiddleware,
    QuotaMiddleware,
    ToolCallLimitMiddleware,
    usage,
)
from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call
from langchain_quota.testing import (
    ScriptedChatModel,
    Turn,
    assert_valid_history,
    captured_decisions,
)
from tests.telemetry import Signals, needs_inline

Middleware = AgentMiddleware[Any, Any, Any]
Form = Literal["sync", "async"]
Kind = Literal["quota", "inline", "drop-in", "graph", "react"]
Order = tuple[int, ...]
Item = TypeVar("Item")

CONFIG = {"configurable": {"thread_id": "thread-1"}}
ANN = {"user_id": "ann"}

VALID = ("Weather", {"degrees": 20})
"""A tool call that delivers the structured answer."""
INVALID = ("Weather", {"degrees": "warm"})


class Weather(BaseModel):
    """The weather."""

    degrees: int


both_forms = pytest.mark.parametrize("form", ["sync", "async"])
"""The hooks of `invoke` and those of `ainvoke`, as the argument `form`.

Only where two bodies exist: functions and observers that are awaited or not, threads, blocking,
cancellation, context variables. All else is proved once, in the async form: `property/` plays
random agents in both and finds no difference.
"""

_INLINE = pytest.param("inline", marks=needs_inline)
either = pytest.mark.parametrize("kind", ["quota", _INLINE])
"""Calls are checked before their own step, or in it: two bodies, as the argument `kind`."""
each_kind = pytest.mark.parametrize("kind", ["quota", _INLINE, "graph"])
"""The same, and in a graph that is written by hand."""
each_middleware = pytest.mark.parametrize("kind", ["quota", "drop-in", _INLINE])

SKIPPED = (
    "Execution stopped before this tool call could run because another tool call in the same batch "
    "exceeded the limit."
)
FINALIZED = (
    "This tool call was not run: the model call that made it was the last one in its budget."
)
ABANDONED = "This tool call was not completed: the run that made it was stopped."
"""What models read in place of an answer; applications match on it."""

PATIENCE = 60
"""For how many seconds a test waits for what must happen."""

_AGENT = {
    *("checkpointer", "context_schema", "response_format", "system_prompt", "state_schema"),
    *("interrupt_before", "interrupt_after", "name", "debug", "cache", "prompt"),
    *("subagents", "interrupt_on"),
}
"""Options of `create_agent`, `compile` and `create_deep_agent`; all others are the quota's."""


def orders(count: int) -> pytest.MarkDecorator:
    """Every order of so many middlewares, as the argument `order`: where they see each other."""
    return pytest.mark.parametrize("order", list(permutations(range(count))), ids=str)


def in_order(order: Order, *items: Item) -> list[Item]:
    return [items[index] for index in order]


def tool_limiter(
    signals: Signals, tool_name: str | None = None, **options: Any
) -> ToolCallLimitMiddleware[Any, Any]:
    """A drop-in for tool calls, of all tools or of one."""
    return ToolCallLimitMiddleware(tool_name=tool_name, telemetry=signals.telemetry, **options)


def model_limiter(signals: Signals, **options: Any) -> ModelCallLimitMiddleware[Any, Any]:
    """A drop-in for model calls."""
    return ModelCallLimitMiddleware(telemetry=signals.telemetry, **options)


NO_ARGUMENTS = StructuredTool.from_function(lambda: "", name="none", description="").args_schema
"""Made once: that takes half as long as to make an agent."""


def recording(name: str, ran: list[str], body: Callable[[], Any] | None = None) -> BaseTool:
    """A tool that records when it has run.

    The `body` comes first: it may raise, interrupt, and in the async form be a coroutine.
    """

    def note(result: Any) -> str:
        ran.append(name)
        return f"{name} ran" if result is None else str(result)

    def run() -> str:
        return note(None if body is None else body())

    async def arun() -> str:
        result = None if body is None else body()
        return note(await result if isawaitable(result) else result)

    of: Any = {"name": name, "description": name, "args_schema": NO_ARGUMENTS}
    return StructuredTool.from_function(run, arun, **of)


def waiting_tool() -> tuple[BaseTool, asyncio.Event, asyncio.Event]:
    """A tool `search` that sets the first event when it runs, and waits for the second."""
    begun, released = asyncio.Event(), asyncio.Event()

    async def search() -> str:
        begun.set()
        await released.wait()
        return "found"

    tool = StructuredTool.from_function(coroutine=search, name="search", description="Search.")
    return tool, begun, released


def asking(*tools: Any) -> Callable[[Sequence[BaseMessage]], Turn]:
    """A script that calls these tools, in one batch, once in each run."""

    def script(messages: Sequence[BaseMessage]) -> Turn:
        return list(tools) if messages[-1].type == "human" else "done"

    return script


def searching(messages: Sequence[BaseMessage]) -> Turn:
    """A script that searches as often as it is told."""
    return ["search"] * int(messages[-1].text) if messages[-1].type == "human" else "done"


def delegate(
    agent: Any, name: str = "delegate", *, started: list[str] | None = None, **given: Any
) -> BaseTool:
    """A tool that notes that it has started, asks another agent, and gives its last answer."""
    asked: Any = {"messages": [("user", "do it")]}
    notes = [] if started is None else started

    def ask() -> str:
        notes.append(name)
        return str(agent.invoke(asked, **given)["messages"][-1].content)

    async def aask() -> str:
        notes.append(name)
        return str((await agent.ainvoke(asked, **given))["messages"][-1].content)

    return StructuredTool.from_function(ask, aask, name=name, description=name)


class Scene:
    """An agent, or a graph, on a thread, and all that it did.

    Args:
        signals: The telemetry that is written to.
        script: What the model plays, or a model of the test's own.
        items: Limits, which one quota of this kind holds the agent to, and further middlewares, in
            list order.
        kind: What holds the agent to the limits: a middleware, a drop-in for each limit, or a
            `GraphQuota` around a StateGraph or a `create_react_agent`.
        form: Which form of the hooks and nodes runs.
        tools: Tools by name, which record that they ran, or tools of others.
        ran: The names of the tools that ran, for tools of the test's own.
        context: The context of the runs from now on.
        thread_id: The thread of the runs from now on; `None` for none.
        state: The graph's state.
        loop: Adds the edges behind the model, in place of `tools_condition`.
        create: What makes the agent, instead of `create_agent`.
        **options: Options of `create_agent` or `compile`, and of the quota.
    """

    quota: Any
    result: dict[str, Any]
    """What the newest run has returned."""

    def __init__(
        self,
        signals: Signals,
        script: Any,
        items: Sequence[Limit | Middleware] = (),
        *,
        kind: Kind = "quota",
        form: Form = "async",
        tools: Sequence[str | BaseTool | dict[str, Any]] = ("search", "calc"),
        ran: list[str] | None = None,
        context: Any = None,
        thread_id: object = "thread-1",
        state: Any = MessagesState,
        loop: Callable[[Any], None] | None = None,
        create: Callable[..., Any] = create_agent,
        **options: Any,
    ) -> None:
        self.signals, self.kind, self.form = signals, kind, form
        self.context, self.thread_id = context, thread_id
        own = isinstance(script, BaseChatModel)
        self.model: ScriptedChatModel = script if own else ScriptedChatModel(script=script)
        self.ran: list[str] = [] if ran is None else ran
        self.tools: list[Any] = [
            recording(each, self.ran) if isinstance(each, str) else each for each in tools
        ]
        self._earlier_tools = self._earlier_models = 0
        self._decided: list[list[Decision]] = []
        limits = [each for each in items if isinstance(each, Limit)]
        others = [each for each in items if isinstance(each, AgentMiddleware)]
        made = {key: value for key, value in options.items() if key in _AGENT}
        made.setdefault("checkpointer", InMemorySaver())
        given = {key: value for key, value in options.items() if key not in _AGENT}
        given["telemetry"] = signals.telemetry
        theirs = [limit for each in others for limit in getattr(each, "limits", ())]
        self.limits = [*limits, *theirs]
        self.agent: Any
        if kind in ("graph", "react"):
            given["store"] = given.get("store") or MemoryStore()
            given |= {"name": made.pop("name")} if "name" in made else {}
            self.quota = langchain_quota.GraphQuota(limits, **given)
            self.agent = self._graph(made, state, loop) if kind == "graph" else self._react(made)
            return
        middleware: list[Middleware] = [*others]
        if limits:
            held = held_to(limits, kind, given)
            self.quota = held[0]
            at = next(index for index, each in enumerate(items) if isinstance(each, Limit))
            middleware[at:at] = held
        self.agent = create(self.model, tools=self.tools, middleware=middleware, **made)

    def _graph(self, made: dict[str, Any], state: Any, loop: Any) -> Any:
        """A loop of model and tools, as it is written by hand."""
        self.graph: Any = StateGraph(state)
        self.graph.add_node("model", model_node(self.quota.model(self.model, self.tools)))
        self.graph.add_node("tools", self.quota.tools(self.tools))
        self.graph.add_edge(START, "model")
        self.graph.add_edge("tools", "model")
        if loop is None:
            self.graph.add_conditional_edges("model", tools_condition)
        else:
            loop(self.graph)
        return self.graph.compile(**made)

    def _react(self, made: dict[str, Any]) -> Any:
        model, tools = self.quota.model(self.model, self.tools), self.quota.tools(self.tools)
        return create_react_agent(model, tools, **made)

    async def play(self, text: str = "hi", **who: Any) -> dict[str, Any]:
        """A new run; `context` and `thread_id` hold from now on."""
        for name, value in who.items():
            setattr(self, name, value)
        self._earlier_tools = len(self.ran)
        self._earlier_models = len(getattr(self.model, "calls", ()))
        self._decided.clear()
        return await self.invoke({"messages": [("user", text)]})

    async def played(self, text: str = "hi", **who: Any) -> Self:
        """The scene itself, after a new run."""
        await self.play(text, **who)
        return self

    async def resume(self, value: Any) -> dict[str, Any]:
        """The same run goes on with an answer to its interrupt."""
        return await self.invoke(Command(resume=value))

    async def go_on(self) -> dict[str, Any]:
        """The same run goes on where it stopped."""
        return await self.invoke(None)

    async def invoke(self, given: Any) -> dict[str, Any]:
        with captured_decisions() as decided:
            self._decided.append(decided)
            if self.form == "sync":
                result = self.agent.invoke(given, self.config, **self._how)
            else:
                result = await self.agent.ainvoke(given, self.config, **self._how)
        self.result = dict(result)
        return self.result

    @property
    def decisions(self) -> list[Decision]:
        """What has been decided in the newest run."""
        return [each for decided in self._decided for each in decided]

    async def updates(self, given: Any, mode: str = "updates") -> list[dict[str, Any]]:
        """What a run streams in a stream mode."""
        how = {**self._how, "stream_mode": mode}
        if self.form == "sync":
            return list(self.agent.stream(given, self.config, **how))
        return [each async for each in self.agent.astream(given, self.config, **how)]

    @property
    def config(self) -> dict[str, Any]:
        return {} if self.thread_id is None else {"configurable": {"thread_id": self.thread_id}}

    @property
    def _how(self) -> dict[str, Any]:
        # What a step wrote is kept, or its failure known, before the next one begins.
        kept = getattr(self.agent, "checkpointer", None) is not None
        return {"context": self.context, **({"durability": "sync"} if kept else {})}

    def state(self) -> dict[str, Any]:
        return dict(self.agent.get_state(self.config).values)

    def answers(self) -> list[tuple[str, str]]:
        """The tool and status of every answer in the history."""
        return [
            (str(each.name), each.status)
            for each in self.state()["messages"]
            if isinstance(each, ToolMessage)
        ]

    def metric(self, limit: str, decision: str, scope: str = "none") -> float:
        labels = {"agent": "unnamed", "limit": limit, "scope": scope, "decision": decision}
        return self.signals.value("langchain_quota_limit_decisions_total", **labels) or 0

    def used(self, limit: Limit) -> tuple[int, int]:
        """What the thread and the run have used of a limit, in the state or the graph's store."""
        if self.kind in ("graph", "react"):
            thread = self._stored(f"{limit.counter}:thread:{self.thread_id}")
            return sum(thread), max(self._stored(f"{limit.counter}:run:*"), default=0)
        run = (state := self.state())["langchain_quota"]["counts"]
        if limit.kind == "model":
            return state.get("thread_model_call_count", 0), run["run_model"]
        thread = state.get("thread_tool_call_count", {}).get(limit.counter, 0)
        return thread, run["run_tools"].get(limit.counter, 0)

    def _stored(self, pattern: str) -> list[int]:
        return [each.used for each in self.quota.store.usages(pattern)]

    def calls(self, decision: str, tool: str | None = None) -> float:
        """The calls of a tool, or else of the model, that were decided so."""
        kind = "model" if tool is None else "tool"
        labels = {"agent": "unnamed", "kind": kind, "tool": tool or "none", "decision": decision}
        return self.signals.value("langchain_quota_calls_total", **labels) or 0

    def last_text(self) -> str:
        """What the newest message says, which is the AI's."""
        newest = self.state()["messages"][-1]
        assert isinstance(newest, AIMessage)
        return newest.text

    def usage(self) -> Any:
        """What the thread and its newest run have used."""
        return usage(self.agent.get_state(self.config))

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the quota, in the scene's form."""
        if self.form == "sync":
            return getattr(self.quota, method)(*arguments, **options)
        return await getattr(self.quota, f"a{method}")(*arguments, **options)

    async def reset(self) -> None:
        """Give the thread its budget back."""
        await self.call("reset", self.agent, self.config)

    def fallbacks(self, action: str) -> float:
        """The calls that were checked without the store."""
        name = "langchain_quota_store_fallbacks_total"
        return sum(self.signals.samples(name, agent="unnamed", action=action).values())

    def check(
        self, *, answered: bool = True, models: int | None = None, models_in_run: int | None = None
    ) -> None:
        """Assert the rules.

        Args:
            answered: Whether every tool call has its answer by now.
            models, models_in_run: The model calls of thread and run, where they are not the
                requests that the model received.
        """
        state = self.state()
        run = self.ran[self._earlier_tools :]
        received = len(self.model.calls)
        models = received if models is None else models
        in_run = received - self._earlier_models if models_in_run is None else models_in_run
        for limit in self.limits:
            if limit.kind == "model":
                thread_count, run_count = models, in_run
            else:
                thread_count, run_count = _matching(limit, self.ran), _matching(limit, run)
            if isinstance(limit.thread_limit, int):
                assert thread_count <= limit.thread_limit, limit.name
            if isinstance(limit.run_limit, int):
                assert run_count <= limit.run_limit, limit.name
            assert self.used(limit) == (thread_count, run_count), limit.name
            charged = self.metric(limit.name, "allowed") - self.metric(limit.name, "refunded")
            assert charged == thread_count, limit.name
        self.check_requests()
        if answered:
            check_history(state["messages"])

    def check_requests(self) -> None:
        """Assert that whatever the model was sent is a valid history."""
        for call in self.model.calls:
            check_history(call.messages)


def model_node(limited: Any) -> Any:
    """A node that calls a limited model, in both forms."""

    def messages(state: Any) -> Any:
        return state["messages"] if isinstance(state, Mapping) else state.messages

    def node(state: Any) -> dict[str, Any]:
        return {"messages": [limited.invoke(messages(state))]}

    async def anode(state: Any) -> dict[str, Any]:
        return {"messages": [await limited.ainvoke(messages(state))]}

    return RunnableLambda(node, anode)


async def until(happens: Callable[[], object]) -> None:
    """Wait for what has no event of its own."""
    async with asyncio.timeout(PATIENCE):
        while not happens():  # noqa: ASYNC110 - so it is
            await asyncio.sleep(0.001)


async def cancel_at(event: asyncio.Event, run: Coroutine[Any, Any, Any]) -> None:
    """Cancel a run as soon as it has come to an event; if it fails before, raise its error."""
    running = asyncio.create_task(run)
    reached = asyncio.create_task(event.wait())
    await asyncio.wait({running, reached}, return_when=asyncio.FIRST_COMPLETED)
    reached.cancel()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def check_history(messages: Sequence[BaseMessage]) -> None:
    """Assert that providers accept a history, but for the ids that the model itself repeats.

    Where a model gives one id to several calls of a message, LangChain answers each of those that
    run, and a refusal answers them all.
    """
    assert_valid_history(_with_distinct_ids(messages))


def _with_distinct_ids(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """The history as if the calls of a message that share an id were one call."""
    found: list[BaseMessage] = []
    calls, answers = Counter[str](), Counter[str]()
    for message in messages:
        if isinstance(message, AIMessage):
            calls, answers = Counter(str(call["id"]) for call in message.tool_calls), Counter()
            distinct = {call["id"] or index: call for index, call in enumerate(message.tool_calls)}
            found.append(message.model_copy(update={"tool_calls": list(distinct.values())}))
        elif isinstance(message, ToolMessage):
            answers[message.tool_call_id] += 1
            if not 1 < answers[message.tool_call_id] <= calls[message.tool_call_id]:
                found.append(message)
        else:
            found.append(message)
    return found


def _matching(limit: Limit, ran: Sequence[str]) -> int:
    return sum(limit.matches(Call("tool", name)) for name in ran)


def held_to(limits: Sequence[Limit], kind: Kind, options: dict[str, Any]) -> list[Middleware]:
    """The middlewares of a kind that hold an agent to limits."""
    if kind == "quota":
        return [QuotaMiddleware(limits, **options)]
    if kind == "inline":
        return [langchain_quota.InlineQuotaMiddleware(limits, **options)]
    made: list[Middleware] = []
    for limit in limits:
        given = {"limit_name": limit.name, **options}
        for name in ("thread_limit", "run_limit", "exit_behavior"):
            given[name] = getattr(limit, name)
        if limit.kind == "tool":
            given["tool_name"] = limit.tools[0] if limit.tools else None
            made.append(ToolCallLimitMiddleware(**given))
        else:
            made.append(ModelCallLimitMiddleware(**given))
    return made


def texts(result: Mapping[str, Any]) -> list[str]:
    """The answers of tool calls, in order."""
    return [str(each.content) for each in result["messages"] if each.type == "tool"]

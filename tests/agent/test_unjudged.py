"""Calls that no limiter judges, in runs with limits: which are counted, and which are not."""

import logging
import operator
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    LLMToolEmulator,
    LLMToolSelectorMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
    PIIMiddleware,
    SummarizationMiddleware,
    TodoListMiddleware,
    ToolRetryMiddleware,
)
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, ToolCall
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, interrupt
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from typing_extensions import TypedDict

from langchain_quota import (
    InlineQuotaMiddleware,
    ModelCallLimit,
    ModelCallLimitMiddleware,
    QuotaMiddleware,
    QuotaWarning,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitMiddleware,
)
from langchain_quota.limits import Limit
from langchain_quota.middleware import _unjudged
from langchain_quota.state import QuotaState
from langchain_quota.testing import ScriptedChatModel
from tests.agent.conftest import Form, both_forms
from tests.agent.rules import CONFIG, recording
from tests.signals import Signals, needs_inline

GO: dict[str, Any] = {"messages": [("user", "Go!")]}
LIMITS: list[Limit] = [ModelCallLimit(run_limit=99), ToolCallLimit(run_limit=99)]
NAME = "langchain_quota_unjudged_calls_total"


class Watched:
    """A `Telemetry` that counts calls which no limiter judges, and what it has counted."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.telemetry = Telemetry(registry=self.registry, count_unjudged_calls=True)

    def quota(self) -> QuotaMiddleware[Any, Any]:
        return QuotaMiddleware[Any, Any](LIMITS, telemetry=self.telemetry)

    def inline(self) -> QuotaMiddleware[Any, Any]:
        return InlineQuotaMiddleware[Any, Any](LIMITS, telemetry=self.telemetry)

    def models(self) -> ModelCallLimitMiddleware[Any, Any]:
        return ModelCallLimitMiddleware(run_limit=99, telemetry=self.telemetry)

    def tools(self, tool_name: str | None = None) -> ToolCallLimitMiddleware[Any, Any]:
        return ToolCallLimitMiddleware(tool_name=tool_name, run_limit=99, telemetry=self.telemetry)

    @property
    def unjudged(self) -> dict[tuple[str, str], float]:
        """How many calls, by agent and kind."""
        return {
            (sample.labels["agent"], sample.labels["kind"]): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == NAME
        }


LIMITERS = [
    pytest.param(lambda watched: watched.quota(), id="quota"),
    pytest.param(lambda watched: watched.tools(), id="tool calls only"),
    pytest.param(lambda watched: watched.models(), id="model calls only"),
    pytest.param(lambda watched: watched.inline(), id="inline", marks=needs_inline),
]


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def search() -> BaseTool:
    return recording("search", [])


def new_agent(*given: Any, **options: Any) -> Any:
    """An agent, typed so that it takes any input."""
    return create_agent(*given, **options)


def model(*script: Any) -> ScriptedChatModel:
    return ScriptedChatModel(script=list(script))


def asking(name: str, *others: Any) -> BaseTool:
    """A tool that calls other runnables, and what it calls."""
    pairs = list(zip(others[::2], others[1::2], strict=True))

    def run() -> str:
        for runnable, given in pairs:
            runnable.invoke(given)
        return "asked"

    async def arun() -> str:
        for runnable, given in pairs:
            await runnable.ainvoke(given)
        return "asked"

    return StructuredTool.from_function(run, arun, name=name, description=name)


async def play(agent: Any, form: Form = "async", given: Any = GO) -> None:
    if form == "sync":
        agent.invoke(given, CONFIG)
    else:
        await agent.ainvoke(given, CONFIG)


@both_forms
async def test_an_agent_in_a_tool(form: Form, watched: Watched, search: BaseTool) -> None:
    """A sub-agent without limits is counted with its model and its tool; its parent is not."""
    child = new_agent(model(["search"], "found"), [search], name="child")
    parent = new_agent(
        model(["ask", "search"], "done"),
        [asking("ask", child, GO), search],
        middleware=[watched.quota()],
        name="parent",
    )

    await play(parent, form)

    assert watched.unjudged == {("child", "model"): 2, ("child", "tool"): 1}


@pytest.mark.parametrize("limiter", LIMITERS)
async def test_a_limited_agent_in_a_tool(
    limiter: Callable[[Watched], Any], watched: Watched, search: BaseTool
) -> None:
    """A sub-agent with limits is judged from its first call on, whichever limiter it has."""
    child = new_agent(
        model(["search"], "found"), [search], middleware=[limiter(watched)], name="child"
    )
    parent = new_agent(
        model(["ask"], "done"), [asking("ask", child, GO)], middleware=[watched.quota()]
    )

    await play(parent)

    assert watched.unjudged == {}


async def test_agents_with_threads_of_their_own(watched: Watched, search: BaseTool) -> None:
    """Agents that have no place in the graph around them are told apart by what they call."""

    def ask(name: str, *middleware: Any) -> BaseTool:
        calls = [
            [ToolCall(name="search", args={}, id=f"{name} {index}", type="tool_call")]
            for index in range(2)
        ]
        child = new_agent(model(*calls, "found"), [search], middleware=list(middleware), name=name)

        async def run() -> str:
            await child.ainvoke(GO, {"configurable": {"thread_id": name}})
            return "asked"

        return StructuredTool.from_function(coroutine=run, name=name, description=name)

    tools = [ask("first", watched.quota()), ask("second", watched.quota()), ask("bare")]
    parent = new_agent(
        model(["first", "second", "bare"], "done"),
        tools,
        middleware=[watched.quota()],
        name="parent",
    )

    await play(parent)

    assert watched.unjudged == {("bare", "model"): 3, ("bare", "tool"): 2}


async def test_what_comes_before_the_first_limiter(watched: Watched) -> None:
    """What an outer agent without limits called before its limited sub-agent began is counted."""
    child = new_agent(model("found"), middleware=[watched.quota()], name="child")
    parent = new_agent(model(["ask"], "done"), [asking("ask", child, GO)], name="parent")

    await play(parent)

    assert watched.unjudged == {("parent", "model"): 2, ("parent", "tool"): 1}


async def test_a_bounded_number_is_looked_at(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root run with too many calls is not looked at."""
    monkeypatch.setattr(_unjudged, "MOST_CALLS", 10)
    chatty = ScriptedChatModel(script=lambda messages: "hm", keep_calls=0)
    ask = asking("ask", *[chatty, "Hm?"] * 20)
    limited = new_agent(model(["ask"], ["ask"], "done"), [ask], middleware=[watched.quota()])

    await play(limited)

    assert watched.unjudged == {}


@both_forms
async def test_direct_calls_in_a_tool(form: Form, watched: Watched, search: BaseTool) -> None:
    """A model, a tool, and a tool by an id of its own that a tool calls are counted."""
    by_hand = ToolCall(name="search", args={}, id="by hand", type="tool_call")
    ask = asking("ask", model("hm"), "Hm?", search, {}, search, by_hand)
    agent = new_agent(model(["ask"], "done"), [ask], middleware=[watched.quota()], name="agent")

    await play(agent, form)

    assert watched.unjudged == {("agent", "model"): 1, ("agent", "tool"): 2}


async def test_no_limits_in_the_run(watched: Watched, search: BaseTool) -> None:
    """Runs without limits are nobody's business."""
    watched.quota()
    agent = new_agent(model(["search"], "done"), [search])

    await play(agent)

    assert watched.unjudged == {}


async def test_limits_that_do_not_count(watched: Watched) -> None:
    """A limit without the switch starts no count, and its own calls are judged for others."""
    plain = QuotaMiddleware[Any, Any](
        [ModelCallLimit(run_limit=9)], telemetry=Telemetry(registry=CollectorRegistry())
    )

    def flow(*outer: AgentMiddleware[Any, Any, Any]) -> Any:
        limited = new_agent(model("found"), middleware=[plain], name="limited")
        bare = new_agent(model("done"), name="bare")
        ask = asking("ask", limited, GO, bare, GO)
        return new_agent(model(["ask"], "done"), [ask], middleware=outer)

    await flow(plain).ainvoke(GO)
    assert watched.unjudged == {}
    await flow(watched.quota()).ainvoke(GO)
    assert watched.unjudged == {("bare", "model"): 1}


async def test_a_middlewares_own_model_calls(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    """A summary is a model call that no limit judged; the log line names its agent."""
    agent = new_agent(
        model("done"),
        middleware=[
            watched.quota(),
            SummarizationMiddleware(model("so far"), trigger=("messages", 2), keep=("messages", 1)),
        ],
        name="agent",
    )
    given = {"messages": [("user", "Hi!"), ("assistant", "Hello."), ("user", "Go!")]}

    with caplog.at_level(logging.WARNING, "langchain_quota"):
        await agent.ainvoke(given)

    assert watched.unjudged == {("agent", "model"): 1}
    (line,) = caplog.messages
    assert line.startswith(
        "no limit judged a model call of agent 'agent', and its run has limits: give the agent"
    )


async def test_the_log(
    watched: Watched, search: BaseTool, caplog: pytest.LogCaptureFixture
) -> None:
    """Each kind of call is logged once, in whatever run, with its agent and what to do."""
    child = new_agent(
        ScriptedChatModel(script=lambda messages: "found" if len(messages) > 1 else ["search"] * 3),
        [search],
        name="child",
    )
    agent = new_agent(
        model(["ask"], ["ask"], "done", ["ask"], "done"),
        [asking("ask", child, GO)],
        middleware=[watched.quota()],
    )

    with caplog.at_level(logging.WARNING, "langchain_quota"):
        await agent.ainvoke(GO)
        await agent.ainvoke(GO)

    assert watched.unjudged == {("child", "model"): 6, ("child", "tool"): 9}
    model_line, tool_line = caplog.records
    assert "model call of agent 'child'" in model_line.getMessage()
    assert "tool call of agent 'child'" in tool_line.getMessage()
    for remedy in ("QuotaMiddleware", "with_limits(", ".react_hooks()", NAME):
        assert remedy in model_line.getMessage()


async def test_two_agents_of_one_chain(watched: Watched) -> None:
    """Agents that a chain calls one after the other are told apart, though neither is nested."""
    limited = new_agent(model("found"), middleware=[watched.quota()], name="limited")
    bare = new_agent(model("done"), name="bare")

    await (limited | bare).ainvoke(GO)

    assert watched.unjudged == {("bare", "model"): 1}


class Answer(BaseModel):
    """An answer."""

    text: str


def once_failing() -> BaseTool:
    tries = iter([True])

    def flaky() -> str:
        if next(tries, False):
            raise ConnectionError
        return "worked"

    async def aflaky() -> str:
        return flaky()

    return StructuredTool.from_function(flaky, aflaky, name="flaky", description="flaky")


def fresh(call_id: str | None = None) -> AIMessage:
    call = ToolCall(name="search", args={}, id=call_id, type="tool_call")
    return AIMessage("", tool_calls=[call, call])


AT_ONCE: dict[str, Any] = {"initial_delay": 0, "jitter": False}

ORDINARY: dict[str, tuple[list[Any], Callable[[Watched], list[Any]], dict[str, Any]]] = {
    "a quota": ([["search"] * 3, ["search"], "done"], lambda w: [w.quota()], {}),
    "model calls only": ([["search"] * 3, "done"], lambda w: [w.models()], {}),
    "tool calls only": ([["search"] * 3, "done"], lambda w: [w.tools()], {}),
    "another tool's calls": ([["search"] * 3, "done"], lambda w: [w.tools("flaky")], {}),
    "stacked": ([["search"] * 3, "done"], lambda w: [w.tools(), w.models(), w.tools("search")], {}),
    "calls without ids": ([fresh(), "done"], lambda w: [w.quota()], {}),
    "calls with one id": ([fresh("one"), "done"], lambda w: [w.quota()], {}),
    "a refused call": (
        [["search"] * 3, ["search"], "done"],
        lambda w: [ToolCallLimitMiddleware(run_limit=2, telemetry=w.telemetry)],
        {},
    ),
    "a structured response": (
        [["search"], [("Answer", {"text": 1})], [("Answer", {"text": "yes"})]],
        lambda w: [w.quota()],
        {"response_format": ToolStrategy(Answer)},
    ),
    "model retries": (
        [ConnectionError(), ["search"], ConnectionError(), "done"],
        lambda w: [w.quota(), ModelRetryMiddleware(max_retries=2, **AT_ONCE)],
        {},
    ),
    "model fallbacks": (
        [ConnectionError(), "done"],
        lambda w: [w.quota(), ModelFallbackMiddleware(model(["search"]))],
        {},
    ),
    "tool retries": (
        [["flaky"], "done"],
        lambda w: [ToolRetryMiddleware(max_retries=2, **AT_ONCE), w.quota()],
        {},
    ),
    "PII and todos": (
        [["search", ("write_todos", {"todos": []})], "done"],
        lambda w: [PIIMiddleware("email"), TodoListMiddleware(), w.quota()],
        {},
    ),
}


@pytest.mark.parametrize("case", ORDINARY.values(), ids=ORDINARY.keys())
@both_forms
async def test_ordinary_agents(case: Any, form: Form, watched: Watched, search: BaseTool) -> None:
    """All calls of an agent with any limiter of ours are judged, whatever stands beside it."""
    script, middleware, options = case
    agent = new_agent(
        model(*script), [search, once_failing()], middleware=middleware(watched), **options
    )

    await play(agent, form)

    assert watched.unjudged == {}


@needs_inline
@pytest.mark.parametrize("script", [[["search"] * 3, ["search"], "done"], [fresh(), "done"]])
async def test_inline(script: Any, watched: Watched, search: BaseTool) -> None:
    """`InlineQuotaMiddleware`, which judges within the model's step, has all calls judged."""
    agent = new_agent(model(*script), [search], middleware=[watched.inline()])

    await play(agent)

    assert watched.unjudged == {}


@pytest.mark.parametrize("how", ["stream", "events"])
async def test_streaming(how: str, watched: Watched, search: BaseTool) -> None:
    """However a run is streamed, the same is counted."""
    bare = new_agent(model(["search"], "found"), [search], name="bare")
    agent = new_agent(
        model(["ask", "search"], "done"),
        [asking("ask", bare, GO), search],
        middleware=[watched.quota()],
    )

    if how == "stream":
        _ = [each async for each in agent.astream(GO, stream_mode="messages", subgraphs=True)]
    else:
        _ = [each async for each in agent.astream_events(GO, version="v2")]

    assert watched.unjudged == {("bare", "model"): 2, ("bare", "tool"): 1}


@pytest.mark.parametrize("limiter", LIMITERS)
@pytest.mark.parametrize(
    "decision",
    [
        {"type": "approve"},
        {"type": "edit", "edited_action": {"name": "flaky", "args": {}}},
        {"type": "reject", "message": "No."},
    ],
    ids=["approve", "edit", "reject"],
)
async def test_a_review(
    limiter: Callable[[Watched], Any], decision: Any, watched: Watched, search: BaseTool
) -> None:
    """What a reviewer lets through, edits or refuses was judged before: none of it is counted."""
    agent = new_agent(
        model(["search", "flaky"], "done"),
        [search, once_failing()],
        middleware=[
            HumanInTheLoopMiddleware({"search": True}),
            ToolRetryMiddleware(max_retries=2, **AT_ONCE),
            limiter(watched),
        ],
        checkpointer=InMemorySaver(),
    )

    await play(agent)
    await play(agent, given=Command(resume={"decisions": [decision]}))

    assert watched.unjudged == {}


@pytest.mark.parametrize("limiter", LIMITERS)
@pytest.mark.parametrize("root", ["agent", "chain"])
async def test_a_resumed_tool(
    limiter: Callable[[Watched], Any], root: str, watched: Watched, search: BaseTool
) -> None:
    """A run that waits for a person, or that goes on then, counts none of its judged calls."""

    async def confirm() -> str:
        """Ask the user."""
        return str(interrupt("Sure?"))

    agent = new_agent(
        model(["confirm", "search"], ["search"], "done"),
        [confirm, search],
        middleware=[limiter(watched)],
        checkpointer=InMemorySaver(),
    )
    flow: Any = agent
    if root == "chain":

        async def call(given: Any) -> Any:
            return await agent.ainvoke(given, CONFIG)

        flow = RunnableLambda(call)

    await play(flow)
    assert watched.unjudged == {}
    await play(flow, given=Command(resume="Yes."))

    assert watched.unjudged == {}


async def test_resumed_beside_a_thread_of_its_own(watched: Watched, search: BaseTool) -> None:
    """A call that waited is not counted because a limited agent without a place ran before it."""
    child = new_agent(model("hi"), middleware=[watched.quota()], name="child")

    async def ask() -> str:
        """Ask another agent."""
        await child.ainvoke(GO, {"configurable": {"thread_id": "its own"}})
        return "asked"

    agent = new_agent(
        model(["ask", "search"], "done"),
        [StructuredTool.from_function(coroutine=ask, name="ask"), search],
        middleware=[watched.quota()],
        checkpointer=InMemorySaver(),
        interrupt_before=["tools"],
    )

    await play(agent)
    await agent.ainvoke(None, {**CONFIG, "max_concurrency": 1})

    assert watched.unjudged == {}


async def test_agents_as_nodes(watched: Watched, search: BaseTool) -> None:
    """Of agents that are nodes of a graph, in parallel, those without limits are counted."""

    class State(TypedDict):
        messages: Annotated[list[Any], operator.add]

    graph: Any = StateGraph(State)
    for name in ("limited", "bare"):
        agent = new_agent(
            model(["search"], "done"),
            [search],
            middleware=[watched.quota()] if name == "limited" else [],
            name=name,
        )
        graph.add_node(name, agent)
        graph.add_edge(START, name)

    await graph.compile().ainvoke({"messages": [("user", "Go!")]})

    # Before 1.2, LangGraph does not give an agent that is a node its name.
    assert {kind: n for (_, kind), n in watched.unjudged.items()} == {"model": 2, "tool": 1}


async def test_a_node_of_ones_own(watched: Watched) -> None:
    """A node beside an agent that calls a model is counted."""

    async def summarise(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model("In short.").ainvoke(state["messages"])]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("agent", new_agent(model("done"), middleware=[watched.quota()]))
    graph.add_node("summarise", summarise)
    graph.add_edge(START, "summarise")
    graph.add_edge("summarise", "agent")

    await graph.compile().ainvoke(GO)

    assert watched.unjudged == {("unnamed", "model"): 1}


async def test_a_loop_by_hand(watched: Watched, search: BaseTool) -> None:
    """A node that calls a model, and by id the tools that it asks for, is counted with both."""

    async def loop(state: MessagesState) -> dict[str, Any]:
        asked = await model(["search"]).ainvoke(state["messages"])
        return {"messages": [asked, await search.ainvoke(asked.tool_calls[0])]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("loop", loop)
    graph.add_node("agent", new_agent(model("done"), middleware=[watched.quota()]))
    graph.add_edge(START, "loop")
    graph.add_edge("loop", "agent")

    await play(graph.compile())

    assert watched.unjudged == {("unnamed", "model"): 1, ("unnamed", "tool"): 1}


@pytest.mark.parametrize(
    ("before", "judging", "after"),
    [
        ("quota.before_model", "model", "quota.after_model"),
        ("boss.quota.before_model", "boss.model", "boss.quota.after_model"),
        ("pre_model_hook", "agent", "post_model_hook"),
        ("before_model", "call_model", "after_model"),
    ],
)
async def test_a_limiter_in_a_graph_by_hand(
    before: str, judging: str, after: str, watched: Watched, search: BaseTool
) -> None:
    """The model and tools of a loop by hand are judged; what its tools call directly is not."""
    quota = watched.quota()
    asked = model(["search", "ask"], "done")

    async def call(state: Any) -> dict[str, Any]:
        return {"messages": [await asked.ainvoke(state["messages"])]}

    graph: Any = StateGraph(QuotaState)
    graph.add_node(before, quota.abefore_model)
    graph.add_node(judging, call)
    graph.add_node(after, quota.aafter_model)
    graph.add_node("tools", ToolNode([search, asking("ask", model("hm"), "Hm?")]))
    graph.add_edge(START, before)
    graph.add_edge(before, judging)
    graph.add_edge(judging, after)
    graph.add_conditional_edges(after, tools_condition)
    graph.add_edge("tools", before)

    # As in a tool of an agent with a name.
    await graph.compile().ainvoke(GO, {"metadata": {"lc_agent_name": "outer"}})

    assert watched.unjudged == {("outer", "model"): 1}


async def test_a_selection_of_tools(watched: Watched, search: BaseTool) -> None:
    """A model that another middleware asks which tools to offer is one that no limit judged."""
    selecting = model(*[[("ToolSelectionResponse", {"tools": ["search"]})]] * 2)
    agent = new_agent(
        model(["search"], "done"),
        [search],
        middleware=[LLMToolSelectorMiddleware(model=selecting), watched.quota()],
    )

    await play(agent)

    assert watched.unjudged == {("unnamed", "model"): 2}


async def test_an_emulated_tool(watched: Watched, search: BaseTool) -> None:
    """A model in place of a tool is a model call that no limit judged."""
    agent = new_agent(
        model(["search"], "done"),
        [search],
        middleware=[watched.quota(), LLMToolEmulator(model=model("nothing"))],
    )

    await play(agent)

    assert watched.unjudged == {("unnamed", "model"): 1}


def transfer(name: str) -> list[str]:
    return [f"transfer_to_{name}"]


@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
async def test_a_supervisor(watched: Watched, search: BaseTool) -> None:
    """A supervisor's own calls, and those of a worker without limits, are counted."""
    langgraph_supervisor = pytest.importorskip("langgraph_supervisor")
    workers = [
        new_agent(model(["search"], "found"), [search], middleware=middleware, name=name)
        for name, middleware in (("limited", [watched.quota()]), ("bare", []))
    ]
    own = model(transfer("limited"), transfer("bare"), "done")

    await langgraph_supervisor.create_supervisor(workers, model=own).compile().ainvoke(GO)

    assert watched.unjudged == {
        ("unnamed", "model"): 3,
        ("unnamed", "tool"): 2,
        ("bare", "model"): 2,
        ("bare", "tool"): 1,
    }


async def test_a_swarm(watched: Watched, search: BaseTool) -> None:
    """Of the agents of a swarm, the one without limits is counted, hand-offs included."""
    langgraph_swarm = pytest.importorskip("langgraph_swarm")
    agents = [
        new_agent(
            ScriptedChatModel(script=script),
            [search, langgraph_swarm.create_handoff_tool(agent_name=other)],
            middleware=middleware,
            name=name,
        )
        for name, other, middleware, script in (
            ("limited", "bare", [watched.quota()], [["search"], transfer("bare"), "done"]),
            ("bare", "limited", [], [["search"], transfer("limited")]),
        )
    ]
    swarm = langgraph_swarm.create_swarm(agents, default_active_agent="limited").compile()

    await swarm.ainvoke(GO)

    assert watched.unjudged == {
        ("bare", "model"): 2,
        ("bare", "tool"): 2,
    }


def deep_agent(*middleware: Any, **options: Any) -> Any:
    """A deep agent whose model gives its task to `general-purpose`."""
    deepagents = pytest.importorskip("deepagents")
    task = {"description": "Find it!", "subagent_type": "general-purpose"}

    def script(messages: Any) -> Any:
        if "PARENT" not in messages[0].text:
            return "found" if messages[-1].type == "tool" else ["search"]
        return "done" if messages[-1].type == "tool" else [("task", task)]

    return deepagents.create_deep_agent(
        ScriptedChatModel(script=script),
        [recording("search", [])],
        system_prompt="PARENT",
        middleware=middleware,
        **options,
    )


def sub_agent(name: str, *middleware: Any) -> dict[str, Any]:
    return {
        "name": name,
        "description": name,
        "system_prompt": name,
        "middleware": list(middleware),
    }


def of_users_own(name: str) -> dict[str, Any]:
    """A sub-agent that is a graph written by hand."""
    graph: Any = StateGraph(MessagesState)
    graph.add_node("model", RunnableLambda(lambda state: {"messages": [AIMessage("found")]}))
    graph.add_edge(START, "model")
    return {"name": name, "description": name, "runnable": graph.compile()}


async def test_deepagents(watched: Watched) -> None:
    """The automatic sub-agent of deepagents, which has no limits, is counted."""
    with pytest.warns(QuotaWarning):
        await deep_agent(watched.quota(), name="parent").ainvoke(GO)

    assert watched.unjudged == {
        ("general-purpose", "model"): 2,
        ("general-purpose", "tool"): 1,
    }


async def test_the_warning_about_deepagents(signals: Signals) -> None:
    """Without the switch the first model call warns of sub-agents without limits; once."""
    limited = QuotaMiddleware[Any, Any]([ModelCallLimit(run_limit=9)], telemetry=signals.telemetry)
    agent = deep_agent(
        limited, subagents=[sub_agent("limited", limited), sub_agent("bare"), of_users_own("own")]
    )

    with pytest.warns(QuotaWarning) as caught:
        await agent.abatch([GO, GO])

    (warning,) = [each for each in caught if each.category is QuotaWarning]
    assert str(warning.message) == (
        "the sub-agents that the tool 'task' of agent 'unnamed' starts have no limits of "
        "langchain-quota: 'general-purpose', 'bare'. Give them their parent's limits: "
        "with_limits(create_deep_agent, quota)(…)"
    )


async def test_the_warning_about_each_agent(signals: Signals) -> None:
    """Each agent is looked at, also where another with the same limits has the same name."""
    limited = QuotaMiddleware[Any, Any]([ModelCallLimit(run_limit=9)], telemetry=signals.telemetry)

    # Every other warning of a test is an error.
    await new_agent(model("done"), middleware=[limited]).ainvoke(GO)
    for _ in range(2):
        agent = deep_agent(limited)
        with pytest.warns(QuotaWarning, match="'general-purpose'"):
            await agent.ainvoke(GO)
        await agent.ainvoke(GO)


@pytest.mark.parametrize(
    "kind", [QuotaMiddleware, pytest.param(InlineQuotaMiddleware, marks=needs_inline)]
)
async def test_no_warning_about_limited_sub_agents(kind: Any, watched: Watched) -> None:
    """Where all sub-agents have a limiter, under whatever name, nothing warns or counts."""

    class Own(kind):  # type: ignore[misc]
        """A subclass with a name of its own."""

        @property
        def name(self) -> str:
            return "own"

    limiter = Own([ModelCallLimit(run_limit=9)], telemetry=watched.telemetry)

    # Every warning of a test is an error.
    await deep_agent(limiter, subagents=[sub_agent("general-purpose", limiter)]).ainvoke(GO)

    assert watched.unjudged == {}


async def test_no_warning_about_another_task(watched: Watched) -> None:
    """A tool that only looks like that of deepagents is not known, and nothing is said of it."""
    subagent_graphs = {"bare": new_agent(model("found"))}

    def task() -> str:
        """Start one of the sub-agents."""
        return ", ".join(subagent_graphs)

    # Every warning of a test is an error.
    await new_agent(model("done"), [task], middleware=[watched.quota()]).ainvoke(GO)

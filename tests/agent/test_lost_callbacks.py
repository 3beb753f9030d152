"""Sub-agents that are called without the callback handlers of the run around them.

They draw on the budget of their root run all the same; where it cannot be known, that is counted.
"""

import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain.tools import ToolRuntime
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.types import Command

from langchain_quota import (
    GraphQuota,
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    TokenLimit,
    ToolCallLimit,
    with_limits,
)
from langchain_quota.limits import Limit
from langchain_quota.middleware._root_run import log_lost
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.agent.trees import ASKED, Tree, ask, config, human
from tests.scene import CONFIG, Form, both_forms, recording
from tests.signals import Signals

LOST = "langchain_quota_lost_root_runs_total"


async def run(agent: Any, form: Form, given: Any = None, asked: Any = ASKED) -> Any:
    """Ask an agent, and return its answer."""
    if form == "sync":
        return agent.invoke(asked, given)
    return await agent.ainvoke(asked, given)


def relay(other: BaseTool, name: str = "relay") -> BaseTool:
    """A tool that calls another one with its config, as the code interpreter's `task()` does."""

    def call(runtime: ToolRuntime) -> str:
        return str(other.run({}, config=runtime.config))

    async def acall(runtime: ToolRuntime) -> str:
        return str(await other.arun({}, config=runtime.config))

    return StructuredTool.from_function(call, acall, name=name, description="Ask.")


@both_forms
async def test_a_tool_that_calls_another(form: Form, signals: Signals) -> None:
    """`other.arun({}, config=runtime.config)` drops the handlers; the sub-agent's budget stays."""
    tree = Tree(signals.telemetry)
    asks = [relay(ask(tree.agent(3)), f"relay_{n}") for n in range(3)]
    top = tree.agent(1, *asks)

    for turn in (1, 2):
        await run(top, form, config())
        assert len(tree.ran) == 5 * turn
    assert signals.value(LOST, agent="unnamed", cause="inside") is None


@both_forms
async def test_a_tool_that_is_called_without_a_config(form: Form, signals: Signals) -> None:
    """`other.arun({})` starts an agent, which draws on the budget of the tool around it."""
    tree = Tree(signals.telemetry)
    other = ask(tree.agent(9))

    def call() -> str:
        return str(other.run({}))

    async def acall() -> str:
        return str(await other.arun({}))

    tool = StructuredTool.from_function(call, acall, name="call", description="Ask.")
    await run(tree.agent(1, tool), form)

    assert len(tree.ran) == 5


@pytest.mark.parametrize("kind", ["agent", "chain"])
@both_forms
async def test_callbacks_of_its_own(kind: str, form: Form, signals: Signals) -> None:
    """A sub-agent that is called with a tracer draws on the budget of the tool that calls it."""
    tree = Tree(signals.telemetry)
    child = tree.agent(3, checkpointer=InMemorySaver())
    called = child if kind == "agent" else RunnableLambda(child.invoke, child.ainvoke)
    tracer = UsageMetadataCallbackHandler()
    given = {**config("child"), "callbacks": [tracer]}
    asks = [ask(called, f"child_{n}", config=given) for n in range(3)]

    await run(tree.agent(1, *asks), form)

    assert len(tree.ran) == 5


class Bare(BaseCallbackHandler):
    """A tracer of the user's own."""


def in_a_thread(tool: BaseTool, given: Callable[[Any], Any]) -> BaseTool:
    """A tool that calls another one in a thread without context, with what a config becomes."""

    def call(runtime: ToolRuntime) -> str:
        with ThreadPoolExecutor() as executor:
            return str(executor.submit(tool.run, {}, config=given(runtime.config)).result())

    return StructuredTool.from_function(call, name="call", description="Ask.")


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(lambda config: config, id="all"),
        pytest.param(lambda config: {**config, "callbacks": [Bare()]}, id="callbacks"),
        pytest.param(lambda config: {"metadata": config["metadata"]}, id="metadata"),
    ],
)
def test_a_thread_with_the_config(given: Any, signals: Signals) -> None:
    """A thread without context that has the tool's config, or only its metadata, has its budget."""
    tree = Tree(signals.telemetry)

    tree.agent(1, in_a_thread(ask(tree.agent(9)), given)).invoke(ASKED)

    assert len(tree.ran) == 5
    assert signals.value(LOST, agent="unnamed", cause="thread") is None


@pytest.mark.parametrize("kind", ["tools", "react"])
def test_a_thread_with_the_config_in_a_graph(kind: str, signals: Signals) -> None:
    """The tools of a graph that is written by hand, and of `create_react_agent`, know it, too."""
    prebuilt = pytest.importorskip("langgraph.prebuilt")
    tree = Tree(signals.telemetry)
    limit = ToolCallLimit("search", quotas=[Quota(5, per="root_run")])
    quota = GraphQuota([limit], store=tree.store, telemetry=signals.telemetry)
    tools = [tree.search(), in_a_thread(ask(tree.agent(9)), lambda config: config)]
    model = ScriptedChatModel(script=[["search", "call"], "done"])
    if kind == "tools":
        graph = quota.add_to(StateGraph(MessagesState), model=model, tools=tools).compile()
    else:
        with pytest.warns(DeprecationWarning, match="create_react_agent"):
            graph = prebuilt.create_react_agent(**quota.react_hooks(model, tools))

    graph.invoke(ASKED)

    assert len(tree.ran) == 5


@both_forms
async def test_an_interrupt_in_a_node_that_handles_errors(form: Form, signals: Signals) -> None:
    """A tool that asks a human interrupts the run, though its node turns errors into answers."""
    tree = Tree(signals.telemetry)
    limit = ToolCallLimit("search", quotas=[Quota(5, per="root_run")])
    quota = GraphQuota([limit], store=tree.store, telemetry=signals.telemetry)
    tool = StructuredTool.from_function(human, name="human", description="Ask somebody.")
    node = quota.tool_node([tool, tree.search()], handle_tool_errors=True)
    model = ScriptedChatModel(script=[["search"], ["human"], "done"])
    builder = quota.add_to(StateGraph(MessagesState), model=model, tools=node)
    graph = builder.compile(checkpointer=InMemorySaver())

    await run(graph, form, config())
    assert graph.get_state(config()).interrupts

    result = await run(graph, form, config(), Command(resume="yes"))
    assert result["messages"][-2].text == "human: yes"


@both_forms
async def test_below_an_agent_without_limits(form: Form, signals: Signals) -> None:
    """Sub-agents share the budget of a run whose outermost agent has no limits."""
    tree = Tree(signals.telemetry)
    asks = [relay(ask(tree.agent(3)), f"relay_{n}") for n in range(3)]
    names = [each.name for each in asks]
    top = create_agent(ScriptedChatModel(script=[names, "done"]), asks)

    await run(top, form)

    assert len(tree.ran) == 5


class Asks(AgentMiddleware[Any, Any, Any]):
    """Asks another agent, with a tracer of its own, before each model call."""

    def __init__(self, agent: Any) -> None:
        super().__init__()
        self.agent = RunnableLambda(agent.invoke, agent.ainvoke)

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        self.agent.invoke(ASKED, {"callbacks": [Bare()]})
        return handler(request)

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        await self.agent.ainvoke(ASKED, {"callbacks": [Bare()]})
        return await handler(request)


@both_forms
async def test_around_a_model_call(form: Form, signals: Signals) -> None:
    """An agent that a middleware asks around a model call draws on the budget of that agent."""
    tree = Tree(signals.telemetry)
    model = ScriptedChatModel(script=[["search"], "done"])
    top = create_agent(model, [tree.search()], middleware=[tree.quota(), Asks(tree.agent(3))])

    await run(top, form)

    assert len(tree.ran) == 5


@both_forms
async def test_all_models_are_charged(form: Form, signals: Signals) -> None:
    """`charge_all_models` charges the sub-agents that are called without the handlers."""
    child = create_agent(ScriptedChatModel(script=lambda _: "done"))
    direct = ScriptedChatModel(script=lambda _: "done")
    alone = StructuredTool.from_function(
        lambda: direct.invoke("Hello!", {"callbacks": [Bare()]}).text,
        name="alone",
        description="Ask.",
    )
    tools = [relay(ask(child)), alone]
    limit = TokenLimit(thread_limit=10**6)
    store = MemoryStore()
    quota = QuotaMiddleware(
        [limit], store=store, charge_all_models=True, telemetry=signals.telemetry
    )
    model = ScriptedChatModel(script=[["relay", "alone"], "done"])

    await run(create_agent(model, tools, middleware=[quota]), form, CONFIG)

    runs = sum(
        sample.value
        for metric in signals.registry.collect()
        for sample in metric.samples
        if sample.name == "langchain_quota_model_runs_total"
    )
    assert runs == 4


def test_what_cannot_be_known(signals: Signals, caplog: pytest.LogCaptureFixture) -> None:
    """An agent in a thread with neither context nor config has its own budget: it is counted."""
    log_lost.cache_clear()
    tree = Tree(signals.telemetry)
    other = ask(tree.agent(9, name="child"))

    def elsewhere() -> str:
        """Ask somebody."""
        with ThreadPoolExecutor() as executor:
            return str(executor.submit(other.run, {}).result())

    top = tree.agent(1, StructuredTool.from_function(elsewhere))

    for turn in (1, 2):
        top.invoke(ASKED)
        assert len(tree.ran) == (1 + 5) * turn
        assert signals.value(LOST, agent="child", cause="thread") == turn
    assert caplog.text.count("copy_context().run") == 1


BEFORE = """
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import StructuredTool
from prometheus_client import REGISTRY

from langchain_quota.testing import ScriptedChatModel

trees: list[Any] = []


def late() -> str:
    "Make an agent with limits, and ask it."
    from langchain_quota import Telemetry
    from tests.agent.trees import ASKED, Tree

    trees[:] = trees or [Tree(Telemetry())]
    trees[0].agent(9, name="late").invoke(ASKED)
    return "done"


model = ScriptedChatModel(script=[["late"], ["late"], "done"])
agent = create_agent(model, [StructuredTool.from_function(late)])
agent.invoke({"messages": [("user", "Go!")]})
labels = {"agent": "late", "cause": "inside"}
print(len(trees[0].ran), REGISTRY.get_sample_value("langchain_quota_lost_root_runs_total", labels))
"""


def test_a_run_that_began_before_the_first_quota() -> None:
    """Agents inside a run that began before the first quota have their own budgets: counted."""
    done = subprocess.run(
        [sys.executable, "-c", BEFORE], check=True, capture_output=True, text=True, timeout=120
    )

    assert done.stdout.split() == ["10", "2.0"]
    assert done.stderr.count("Make middlewares when the program starts") == 1


PROGRAM = """
const asked = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10].map(
    (n) => task({description: "Look for it.", subagentType: "researcher"})
);
const done = await Promise.all(asked);
done.length
"""


@pytest.mark.filterwarnings("ignore:The class `CodeInterpreterMiddleware` is in beta")
@both_forms
async def test_the_code_interpreter(form: Form, signals: Signals) -> None:
    """Ten sub-agents that a program of the code interpreter starts at once share one budget."""
    deepagents = pytest.importorskip("deepagents")
    interpreter = pytest.importorskip("langchain_quickjs")
    ran: list[str] = []

    def script(messages: Sequence[BaseMessage]) -> Turn:
        if messages[-1].type != "human":
            return "done"
        if "Look for it." in messages[-1].text:
            return ["search", "search"]
        return [("eval", {"code": PROGRAM})]

    model, store = ScriptedChatModel(script=script), MemoryStore()
    limits: list[Limit] = [
        ToolCallLimit("search", quotas=[Quota(3, per="root_run")]),
        ModelCallLimit(quotas=[Quota(9, per="root_run")]),
    ]
    quota = QuotaMiddleware(limits, store=store, telemetry=signals.telemetry)
    agent = with_limits(deepagents.create_deep_agent, quota)(
        model,
        [recording("search", ran)],
        subagents=[{"name": "researcher", "description": "Looks.", "system_prompt": "Look."}],
        middleware=[interpreter.CodeInterpreterMiddleware(timeout=60)],
    )

    await run(agent, form, CONFIG)

    assert len(ran) == 3
    assert len(model.calls) == 9
    assert {use.key.split("@")[0]: use.used for use in store.usages("?*:root_run:*")} == {
        "search:root_run:thread-1": 3,
        "model:root_run:thread-1": 9,
    }

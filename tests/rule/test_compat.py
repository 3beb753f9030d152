"""Each function of `runtime/compat.py` reads what it says, in the versions that are installed.

A test has the name of its function: where one fails, a package has changed what it never promised.
"""

import ast
import threading
from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction, signature
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_config
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.runtime import get_runtime
from langgraph.types import Command, interrupt

from langchain_quota.runtime import compat
from langchain_quota.testing import ScriptedChatModel

GO: Any = {"messages": [("user", "Go!")]}
CONFIG: Any = {"configurable": {"thread_id": "7"}}


def spy(see: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """A tool that looks at something each time it runs, and what it has seen."""
    seen: list[Any] = []

    def look() -> str:
        """Look."""
        seen.append(see())
        return "seen"

    return StructuredTool.from_function(look), seen


def agent(*tools: Any, **options: Any) -> Any:
    return create_agent(ScriptedChatModel(script=[["look"], "Done."]), [*tools], **options)


def around(inner: Any, **options: Any) -> Any:
    """A graph with an agent as a node."""
    graph = StateGraph(MessagesState)
    graph.add_node("inner", inner)
    graph.add_edge(START, "inner")
    return graph.compile(**options)


def is_saved(_: str) -> bool:
    return compat.checkpointer(get_config()["configurable"]) is not None


NAMED = {"name": "writer"}
IN_A_TOOL: dict[str, tuple[Callable[[str], Any], int, dict[str, Any], object]] = {
    "agent_name": (lambda _: compat.agent_name(get_config()["metadata"]), 0, NAMED, "writer"),
    "checkpointer": (is_saved, 1, {"checkpointer": InMemorySaver()}, True),
    "checkpointer, without one": (is_saved, 1, {}, False),
    "enclosing_tasks": (lambda ns: [t[:6] for t in compat.enclosing_tasks(ns)], 1, {}, ["inner:"]),
    "enclosing_tasks, two": (lambda ns: len(compat.enclosing_tasks(ns)), 2, {}, 2),
    "node_of": (compat.node_of, 0, {}, "tools"),
    "runs_tools": (lambda ns: [*map(compat.runs_tools, ns.split("|"))], 1, {}, [False, True]),
}
"""What a tool sees in an agent, inside so many graphs of which the outermost has options."""


OF_CAPS = "scenario/test_concurrency_limit.py"
ELSEWHERE = {
    "ask": "scenario/test_ask.py::test_interfaces_can_show_a_form",
    "asks_before_run": f"{OF_CAPS}::test_a_call_whose_node_runs_again",
    "finished_tasks": "scenario/test_old_checkpoints.py::test_a_step_cut_off",
    "for_parent": "scenario/test_ended_runs.py::test_a_sub_agent_in_a_node",
    "hide_raised": "scenario/test_cost_budgets.py::test_a_model_without_a_price_is_not_called",
    "interpreter_settings": "scenario/test_code_interpreters.py::test_a_deep_agent_does_not_run",
    "is_from_factory": "arguments/test_limit_arguments.py::test_a_mistake_says_what_to_write",
    "is_multiprocess": "signals/test_several_workers.py::test_any_worker_answers_for_all",
    "is_resumed_step": "scenario/test_old_checkpoints.py::test_what_runs_again",
    "model_parameters": "scenario/test_model_pace.py::test_one_refusal_paces_all",
    "nodes": "signals/test_logs.py::test_langchains_limiters_beside_ours",
    "note_tracers": "signals/test_tracers_beside.py::test_a_trace_is_little_larger",
    "runs_in_thread": f"{OF_CAPS}::test_a_cancelled_run_does_not_end_its_sync_tool",
    "small_traces": "signals/test_tracers_beside.py::test_the_users_policy_applies",
    "starts_sub_agents": "scenario/test_deep_agents.py::test_the_warning",
    "sub_agents_of": "scenario/test_deep_agents.py::test_the_warning",
    "with_run": f"{OF_CAPS}::test_a_cancelled_run_does_not_end_its_sync_tool",
    "with_state": "scenario/test_nodes.py::test_two_of_them",
    "without_created": "signals/test_counters.py::test_no_series_has_the_time_of_creation",
}
"""The tests of functions that an agent shows as they are."""


class Runs(BaseCallbackHandler):
    """The metadata of the runs of models."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_chat_model_start(self, *_: Any, metadata: Any = None, **__: Any) -> None:
        self.seen.append(metadata)


def test_each_function_has_a_test() -> None:
    """Every function of the module has a test, which names it, and CONTRIBUTING lists each."""
    tree = ast.parse(Path(compat.__file__).read_text())
    functions = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    public = {each for each in functions if not each.startswith("_")}
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    assert {each for each in public if f"`{each}`" not in page} == set()
    tests = " ".join([*globals(), *IN_A_TOOL])
    assert {each for each in public if each not in tests} <= ELSEWHERE.keys()
    root = Path(__file__).parents[1]
    for test in ELSEWHERE.values():
        path, _, function = test.partition("::")
        assert f"def {function}(" in (root / path).read_text()


@pytest.mark.parametrize(("see", "depth", "options", "seen"), IN_A_TOOL.values(), ids=IN_A_TOOL)
def test_in_a_tool(
    see: Callable[[str], Any], depth: int, options: dict[str, Any], seen: object
) -> None:
    """A tool finds its agent, its task and the graphs around them where LangGraph puts them."""
    look, found = spy(lambda: see(get_config()["configurable"]["checkpoint_ns"]))
    graph = agent(look, **({} if depth else options))
    for level in range(depth):
        graph = around(graph, **(options if level == depth - 1 else {}))
    graph.invoke(GO, CONFIG)
    assert found == [seen]


def test_checkpoint_ids() -> None:
    """An agent in a graph finds the checkpoints of both, by their namespaces."""
    look, found = spy(lambda: [*compat.checkpoint_ids(get_config()["configurable"])])
    around(agent(look), checkpointer=InMemorySaver()).invoke(GO, CONFIG)
    assert [namespace.partition(":")[0] for namespace in found[0]] == ["", "inner"]


def test_is_from_create_agent() -> None:
    """A graph of one's own is told from an agent."""
    assert compat.is_from_create_agent(agent())
    assert not compat.is_from_create_agent(around(agent()))


async def test_untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in is awaited by LangChain like the hook, and gets no wrapper."""
    ran = []

    class Hooked(AgentMiddleware):
        async def awrap_model_call(
            self, request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[Any]]
        ) -> Any:
            ran.append(request)
            return await handler(request)

    middleware = Hooked()
    stand_in = compat.untraced(middleware, "awrap_model_call")
    monkeypatch.setattr(middleware, "awrap_model_call", stand_in)
    await agent(middleware=[middleware]).ainvoke(GO)
    assert (len(ran), iscoroutinefunction(stand_in)) == (1, False)
    assert [*signature(stand_in).parameters] == ["request", "handler"]


@pytest.mark.parametrize("mode", ["", "a"])
def test_response_hooks(mode: str) -> None:
    """The clients of OpenAI and Anthropic have lists of hooks, in which ours stays."""
    openai, anthropic = map(pytest.importorskip, ("langchain_openai", "langchain_anthropic"))
    key = {"api_key": "none", "model": "some"}
    for model in (openai.ChatOpenAI(**key), anthropic.ChatAnthropic(**key)):
        hooks = compat.response_hooks(model, mode)
        assert hooks is not None
        hooks.append(print)
        assert hooks is compat.response_hooks(model, mode)
        hooks.remove(print)
    assert compat.response_hooks(ScriptedChatModel(script=[]), mode) is None


def test_is_in_node_and_task_namespace() -> None:
    """A run inside a node knows its task, and is told from one that nothing encloses."""
    handler = Runs()
    agent().invoke(GO, {"callbacks": [handler]})
    ScriptedChatModel(script=["Hi."]).invoke("Hi!", {"callbacks": [handler]})
    assert [*map(compat.is_in_node, handler.seen)] == [True, False]
    assert compat.task_namespace(handler.seen[0]).startswith("model:")


def test_task_id() -> None:
    """A task that runs again, when it is resumed, has the id that it had."""

    def see() -> Any:
        info: Any = get_runtime().execution_info
        ids.append(info.task_id)
        return interrupt("?")

    ids: list[Any] = []
    asking = agent(spy(see)[0], checkpointer=InMemorySaver())
    asking.invoke(GO, CONFIG)
    asking.invoke(Command(resume="yes"), CONFIG)
    assert (len(ids), len({*ids}), bool(ids[0])) == (2, 1, True)


def test_is_answered() -> None:
    """A question is answered when its task is resumed, and it takes the first answer."""
    look, seen = spy(lambda: (compat.is_answered(), interrupt("?")))
    asking = agent(look, checkpointer=InMemorySaver())
    asking.invoke(GO, CONFIG)
    assert asking.invoke(Command(resume="first"), CONFIG)["__interrupt__"]
    asking.invoke(Command(resume="second"), CONFIG)
    assert seen == [(True, "second")]


@pytest.mark.parametrize("kind", [threading.Lock, threading.RLock])
def test_reset_lock(kind: Callable[[], Any]) -> None:
    """A lock that another thread holds is free after it is reset."""
    lock = kind()
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()
    compat.reset_lock(lock)
    assert lock.acquire(blocking=False)

"""Each function of `runtime/compat.py` reads what it says, in the versions that are installed.

A test has the name of its function: where one fails, a package has changed what it never promised.
"""

import ast
import threading
from collections.abc import Awaitable, Callable
from functools import wraps
from inspect import iscoroutinefunction, signature
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_config
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.runtime import get_runtime
from langgraph.types import Command, interrupt
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from langchain_quota.runtime import compat
from langchain_quota.testing import ScriptedChatModel
from tests.forked import run_python

GO: Any = {"messages": [("user", "Go!")]}
CONFIG: Any = {"configurable": {"thread_id": "7"}}


def spy(see: Callable[[], Any]) -> tuple[BaseTool, list[Any]]:
    """A tool that looks at something each time it runs, and what it has seen."""
    seen: list[Any] = []

    def look() -> str:
        """Look."""
        seen.append(see())
        return "seen"

    return StructuredTool.from_function(look), seen


def agent(*tools: BaseTool, **options: Any) -> Any:
    return create_agent(ScriptedChatModel(script=[["look"], "Done."]), [*tools], **options)


def around(inner: Any, **options: Any) -> Any:
    """A graph with an agent as a node."""
    graph = StateGraph(MessagesState)
    graph.add_node("inner", inner)
    graph.add_edge(START, "inner")
    return graph.compile(**options)


def namespace() -> str:
    found: str = get_config()["configurable"]["checkpoint_ns"]
    return found


class Runs(BaseCallbackHandler):
    """The metadata of the runs of models."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_chat_model_start(self, *_: Any, metadata: Any = None, **__: Any) -> None:
        self.seen.append(metadata)


def test_each_function_has_a_test() -> None:
    """No function of the module is without the test that names it, and CONTRIBUTING lists each."""
    tree = ast.parse(Path(compat.__file__).read_text())
    functions = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    public = {each for each in functions if not each.startswith("_")}
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    assert {each for each in public if f"`{each}`" not in page} == set()
    assert {each for each in public if f"test_{each}" not in globals()} == set()


def test_agent_name() -> None:
    """An agent's name is in the metadata of its tools."""
    look, seen = spy(lambda: compat.agent_name(get_config()["metadata"]))
    agent(look, name="researcher").invoke(GO)
    assert seen == ["researcher"]


def test_agent_metadata() -> None:
    """Metadata that name an agent are read like its own."""
    look, seen = spy(lambda: compat.agent_name(get_config()["metadata"]))
    agent(look).invoke(GO, {"metadata": compat.agent_metadata("writer")})
    assert seen == ["writer"]


def test_is_from_create_agent() -> None:
    """A graph of one's own is told from an agent."""
    assert compat.is_from_create_agent(agent())
    assert not compat.is_from_create_agent(around(agent()))


def test_with_state() -> None:
    """A request with another state leaves the first one as it is, and warns of nothing."""
    given: Any = {"model": ScriptedChatModel(script=[]), "messages": [], "state": {"a": 1}}
    request: Any = ModelRequest(**given)
    other: Any = compat.with_state(request, {"a": 2})
    assert other.state == {"a": 2}
    assert request.state == {"a": 1}


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
    assert len(ran) == 1
    assert (iscoroutinefunction(stand_in), [*signature(stand_in).parameters]) == (
        False,
        ["request", "handler"],
    )


@pytest.mark.parametrize("is_async", [False, True])
async def test_runs_in_thread(*, is_async: bool) -> None:
    """Where a tool runs is known before it does."""

    async def alook() -> None:
        seen.append(threading.current_thread())

    look, seen = spy(threading.current_thread)
    assert isinstance(look, StructuredTool)
    look.coroutine = alook if is_async else None
    in_thread = compat.runs_in_thread(look)
    await agent(look).ainvoke(GO)
    assert [each is not threading.current_thread() for each in seen] == [in_thread]
    assert in_thread is not is_async


async def test_with_run() -> None:
    """A wrapped copy is what runs, in every way; the tool itself is as before."""
    look, seen = spy(bool)
    wrapped: list[Any] = []

    def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def counted(*given: Any, **more: Any) -> Any:
            wrapped.append(1)
            return run(*given, **more)

        return counted

    copied = compat.with_run(look, wrap)
    assert (copied.invoke({}), await copied.ainvoke({}), look.invoke({})) == ("seen",) * 3
    assert (len(wrapped), len(seen)) == (2, 3)


def test_model_parameters() -> None:
    """A model says its provider before it is called."""
    model, handler = ScriptedChatModel(script=["Hi."]), Runs()
    model.invoke("Hi!", {"callbacks": [handler]})
    known = compat.model_parameters(model, {})
    assert known["ls_provider"]
    assert handler.seen[0]["ls_provider"] == known["ls_provider"]


@pytest.mark.parametrize("saver", [None, InMemorySaver()])
def test_has_checkpointer(saver: InMemorySaver | None) -> None:
    """A checkpointer is seen in an agent, and in an agent within a graph that has it."""
    look, seen = spy(lambda: compat.has_checkpointer(get_config()["configurable"]))
    agent(look, checkpointer=saver).invoke(GO, CONFIG)
    around(agent(look), checkpointer=saver).invoke(GO, CONFIG)
    assert seen == [saver is not None] * 2


def test_task_namespace() -> None:
    """A model's run knows the task that has started it."""
    handler = Runs()
    agent().invoke(GO, {"callbacks": [handler]})
    assert compat.task_namespace(handler.seen[0]).startswith("model:")


def test_is_in_node() -> None:
    """A run inside a node is told from one that nothing encloses."""
    handler = Runs()
    agent().invoke(GO, {"callbacks": [handler]})
    ScriptedChatModel(script=["Hi."]).invoke("Hi!", {"callbacks": [handler]})
    assert [*map(compat.is_in_node, handler.seen)] == [True, False]


def test_graph_namespace() -> None:
    """The tasks of one graph share its namespace; the outermost graph has none."""
    look, seen = spy(lambda: compat.graph_namespace(namespace()))
    agent(look).invoke(GO)
    around(agent(look)).invoke(GO)
    assert (seen[0], seen[1].partition(":")[0]) == ("", "inner")


def test_enclosing_tasks() -> None:
    """The tasks around a tool: none in an agent, the node of an agent in a graph."""
    look, seen = spy(lambda: [*map(compat.node_of, compat.enclosing_tasks(namespace()))])
    agent(look).invoke(GO)
    around(around(agent(look))).invoke(GO)
    assert seen == [[], ["inner", "inner"]]


def test_is_one_call() -> None:
    """A task of a graph has an id."""
    look, seen = spy(lambda: [*map(compat.is_one_call, compat.enclosing_tasks(namespace()))])
    around(agent(look)).invoke(GO)
    assert seen == [[True]]


def test_node_of() -> None:
    """The name of the running node."""
    look, seen = spy(lambda: compat.node_of(namespace()))
    agent(look).invoke(GO)
    assert seen == ["tools"]


def test_runs_tools() -> None:
    """The node of an agent's tools is told from a node of a graph."""
    look, seen = spy(lambda: [*map(compat.runs_tools, namespace().split("|"))])
    around(agent(look)).invoke(GO)
    assert seen == [[False, True]]


def test_task_id() -> None:
    """A task that runs again, when it is resumed, has the id that it had."""

    def see() -> str:
        ids.append(compat.task_id(get_runtime().execution_info))
        return str(interrupt("?"))

    ids: list[Any] = []
    look, _ = spy(see)
    asking = agent(look, checkpointer=InMemorySaver())
    asking.invoke(GO, CONFIG)
    asking.invoke(Command(resume="yes"), CONFIG)
    assert (len(ids), len({*ids})) == (2, 1)
    assert ids[0]


def test_is_answered() -> None:
    """A question is answered when its task is resumed, and it takes the first answer."""
    look, seen = spy(lambda: (compat.is_answered(), interrupt("?")))
    asking = agent(look, checkpointer=InMemorySaver())
    asking.invoke(GO, CONFIG)
    assert asking.invoke(Command(resume="first"), CONFIG)["__interrupt__"]
    asking.invoke(Command(resume="second"), CONFIG)
    assert seen == [(True, "second")]


def starter() -> Any:
    """The function by which a deep agent starts its sub-agents."""
    deepagents = pytest.importorskip("deepagents")  # not among the oldest versions
    spec = {"name": "helper", "description": "Helps.", "system_prompt": "Help!"}
    made = deepagents.create_deep_agent(ScriptedChatModel(script=["Hi."]), subagents=[spec])
    return made.nodes["tools"].bound.tools_by_name["task"].func


def test_starts_sub_agents() -> None:
    """The function of the tool `task` is told from others."""
    assert compat.starts_sub_agents(starter())
    assert not compat.starts_sub_agents(starter)


def test_sub_agents_of() -> None:
    """The sub-agents are known by name."""
    assert {"helper", "general-purpose"} <= {*compat.sub_agents_of(starter())}


def test_interpreters_exist() -> None:
    """That the package is imported is seen."""
    pytest.importorskip("langchain_quickjs")
    assert compat.interpreters_exist()


@pytest.mark.filterwarnings("ignore:The class `CodeInterpreterMiddleware` is in beta")
def test_interpreter_settings() -> None:
    """What code may call is known; of another version's settings it is known that it is not."""
    quickjs = pytest.importorskip("langchain_quickjs")
    middleware = quickjs.CodeInterpreterMiddleware(ptc=["search"], subagents=False)
    function = middleware.tools[0].func or middleware.tools[0].coroutine
    assert compat.interpreter_settings(function) == (["search"], False)
    assert compat.interpreter_settings(spy) == ([], False)
    del middleware._ptc
    assert compat.interpreter_settings(function) is None


@pytest.mark.parametrize("kind", [Counter, Histogram])
def test_without_created(kind: type[Counter] | type[Histogram]) -> None:
    """A metric has no series of the time of its creation."""
    registry = CollectorRegistry()
    compat.without_created(kind)("calls", "Calls.", ["tool"], registry=registry).labels("search")
    text = generate_latest(registry).decode()
    assert ("_created" in text, "calls_" in text) == (False, True)


def test_is_multiprocess(tmp_path: Path) -> None:
    """Whether processes share files is seen."""
    assert not compat.is_multiprocess()
    program = (
        f"import os; os.environ['PROMETHEUS_MULTIPROC_DIR'] = {str(tmp_path)!r}\n"
        "from langchain_quota.runtime import compat; print(compat.is_multiprocess())\n"
    )
    assert run_python(program).stdout.strip() == "True"


def test_reset_lock() -> None:
    """A lock that is held is free after it is reset."""
    for lock in (threading.Lock(), threading.RLock()):
        taken: Any = lock
        threading.Thread(target=taken.acquire).start()
        while taken.acquire(blocking=False):
            taken.release()
        compat.reset_lock(taken)
        assert taken.acquire(blocking=False)

"""Which agent, on which thread and in which task: from what LangGraph gives a hook."""

from dataclasses import replace
from typing import Any, TypedDict

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime

from langchain_quota.middleware.origin import Origin, origin

IN_A_TASK = Origin("boss", "7", "task", "7", "node:task")


class Nothing(TypedDict, total=False):
    """A state without keys."""

    unused: int


def test_a_step_is_named_after_its_task() -> None:
    """The same middleware in the same task has one name, so that a re-run is recognized."""
    assert IN_A_TASK.step("QuotaMiddleware") == IN_A_TASK.step("QuotaMiddleware")


@pytest.mark.parametrize(
    "other",
    [
        replace(IN_A_TASK, task_id="another"),
        replace(IN_A_TASK, run_thread_id="8"),
        replace(IN_A_TASK, run_thread_id=None),
        replace(IN_A_TASK, checkpoint_ns="node:other"),
        # What is joined cannot be told apart by moving a border.
        replace(IN_A_TASK, task_id="", checkpoint_ns="node:tasktask"),
    ],
    ids=["task", "thread", "no thread", "namespace", "border"],
)
def test_other_tasks_are_other_steps(other: Origin) -> None:
    """A task of another thread or place in the graphs has a step of its own."""
    assert other.step("QuotaMiddleware") != IN_A_TASK.step("QuotaMiddleware")


def test_other_middlewares_are_other_steps() -> None:
    """Two middlewares in one task do not answer for each other."""
    assert IN_A_TASK.step("QuotaMiddleware") != IN_A_TASK.step("Mine")


@pytest.mark.parametrize(
    "thread_id", ["\ud800", "a" * 5000, 7, ("a", 1)], ids=["surrogate", "long", "int", "tuple"]
)
def test_a_step_has_a_short_name(thread_id: object) -> None:
    """Whatever a thread's id is, the step has a name, and nothing of the id is in it."""
    name = replace(IN_A_TASK, run_thread_id=thread_id).step("QuotaMiddleware")
    assert len(name) == 64
    assert name.isalnum()


def test_outside_of_a_graph_every_call_is_a_step() -> None:
    """Hooks that are called directly are never taken for a re-run."""
    assert Origin().step("QuotaMiddleware") != Origin().step("QuotaMiddleware")
    assert Origin().run() != Origin().run()


def test_a_run_is_named_after_the_task_that_begins_it() -> None:
    """The same task begins the same run, another one another, and none has a step's name."""
    assert IN_A_TASK.run() == IN_A_TASK.run()
    assert IN_A_TASK.run() != replace(IN_A_TASK, task_id="another").run()
    assert IN_A_TASK.run() != IN_A_TASK.step("QuotaMiddleware")


def test_a_sub_agents_run_is_named_after_its_call() -> None:
    """A call that is made again is the same run, whatever the task; another call is another."""
    call = replace(IN_A_TASK, invocation="tools:1")
    assert call.run() == replace(call, task_id="another", checkpoint_ns="tools:1|node:2").run()
    others = [
        replace(call, invocation="tools:2"),
        replace(call, run_thread_id="8"),
        replace(call, invocation=""),
    ]
    assert len({each.run() for each in (call, *others)}) == 4


def test_outside_of_a_graph_nothing_is_known() -> None:
    """Where a hook is called directly there is neither agent nor thread, and no error."""
    assert origin(None, model_name=None) == Origin()
    assert origin(Runtime(), model_name="boss") == Origin()


class Seen:
    """A graph with one node, which reads its origin."""

    def __init__(self, **options: Any) -> None:
        self.origins: list[Origin] = []

        def node(state: Nothing, runtime: Runtime[Any]) -> dict[str, int]:
            self.origins.append(origin(runtime, model_name=None))
            return {"unused": 1}

        graph = StateGraph(Nothing)
        graph.add_node("node", node)
        graph.add_edge(START, "node")
        graph.add_edge("node", END)
        self.graph = graph.compile(**options)

    def run(self, config: RunnableConfig | None = None) -> Origin:
        self.graph.invoke({}, config)
        return self.origins[-1]


def test_in_a_graph() -> None:
    """A hook's agent, thread and task are those of the run that it is in."""
    config: RunnableConfig = {
        "configurable": {"thread_id": 7},
        "metadata": {"lc_agent_name": "boss"},
    }
    found = Seen(checkpointer=InMemorySaver()).run(config)
    assert (found.agent, found.thread_id, found.run_thread_id) == ("boss", 7, 7)
    assert found.task_id is not None
    assert found.checkpoint_ns.startswith("node:")
    assert found.remembers


def test_each_run_has_steps_of_its_own() -> None:
    """The next turn on a thread is another task: its calls are charged anew."""
    seen = Seen(checkpointer=InMemorySaver())
    config: RunnableConfig = {"configurable": {"thread_id": "7"}}
    first, second = seen.run(config), seen.run(config)
    assert first.step("QuotaMiddleware") != second.step("QuotaMiddleware")


def test_runs_without_a_thread_have_steps_of_their_own() -> None:
    """Two runs of one agent without a checkpointer and a thread are not taken for one."""
    seen = Seen()
    first, second = seen.run(), seen.run()
    assert (first.thread_id, first.remembers) == (None, False)
    assert first.step("QuotaMiddleware") != second.step("QuotaMiddleware")


@pytest.mark.parametrize("remembers", [True, False], ids=["checkpointer", "none"])
def test_a_call_of_a_sub_agent(*, remembers: bool) -> None:
    """With a checkpointer each call of a sub-agent has a place of its own, its caller has none."""
    child = Seen()
    callers: list[Origin] = []

    def call(state: Nothing, runtime: Runtime[Any]) -> dict[str, int]:
        callers.append(origin(runtime, model_name=None))
        child.run()
        child.run()
        return {"unused": 1}

    graph = StateGraph(Nothing)
    graph.add_node("call", call)
    graph.add_edge(START, "call")
    config: RunnableConfig = {"configurable": {"thread_id": "7"}}
    graph.compile(checkpointer=InMemorySaver() if remembers else None).invoke({}, config)

    assert [each.invocation for each in callers] == [""]
    first, second = (each.invocation for each in child.origins)
    if remembers:
        assert first.startswith("call:")
        assert second == f"{first}|1"
    else:
        assert (first, second) == ("", "")
    assert child.origins[0].run() != child.origins[1].run()

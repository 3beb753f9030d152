"""Who calls, from what LangGraph gives a hook, and the limits that hold for them."""

import asyncio
import gc
import re
import warnings
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict
from uuid import UUID

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime

from langchain_quota import ModelCallLimit, Quota, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.middleware._context import (
    CallContext,
    aresolve,
    call_context,
    checked_subject,
    resolve,
    subject_of,
)
from langchain_quota.middleware._reset import thread_keys
from langchain_quota.resolved import ResolvedLimit, ResolvedQuota
from tests.signals import Signals

IN_A_TASK = CallContext("boss", "7", "task", "7", "node:task")


def test_a_step_is_named_after_its_task() -> None:
    """The same middleware in the same task has one name, so that a re-run is recognized."""
    assert IN_A_TASK.step("QuotaMiddleware") == IN_A_TASK.step("QuotaMiddleware")
    assert IN_A_TASK.step("QuotaMiddleware") != IN_A_TASK.step("Mine")


@pytest.mark.parametrize(
    "other",
    [
        IN_A_TASK._replace(task_id="another"),
        IN_A_TASK._replace(run_thread_id="8"),
        IN_A_TASK._replace(run_thread_id=None),
        IN_A_TASK._replace(checkpoint_ns="node:other"),
        # What is joined is not the same with a border moved.
        IN_A_TASK._replace(task_id="", checkpoint_ns="node:tasktask"),
    ],
    ids=["task", "thread", "no thread", "namespace", "border"],
)
def test_other_tasks_are_other_steps(other: CallContext) -> None:
    """A task of another thread or place in the graphs has a step of its own."""
    assert other.step("QuotaMiddleware") != IN_A_TASK.step("QuotaMiddleware")


@pytest.mark.parametrize(
    "thread_id", ["\ud800", "a" * 5000, ("a", 1)], ids=["surrogate", "long", "tuple"]
)
def test_a_step_has_a_short_name(thread_id: object) -> None:
    """Whatever a thread's id is, the step has a name, and nothing of the id is in it."""
    name = IN_A_TASK._replace(run_thread_id=thread_id).step("QuotaMiddleware")
    assert len(name) == 64
    assert name.isalnum()


def test_outside_of_a_graph_every_call_is_a_step() -> None:
    """Hooks that are called directly are never taken for a re-run."""
    assert CallContext().step("QuotaMiddleware") != CallContext().step("QuotaMiddleware")
    assert CallContext().run() != CallContext().run()


def test_a_run_is_named_after_the_task_that_begins_it() -> None:
    """The same task begins the same run, another one another, and none has a step's name."""
    assert IN_A_TASK.run() == IN_A_TASK.run()
    assert IN_A_TASK.run() != IN_A_TASK._replace(task_id="another").run()
    assert IN_A_TASK.run() != IN_A_TASK.step("QuotaMiddleware")


def test_a_sub_agents_run_is_named_after_its_call() -> None:
    """A call that is made again is the same run, whatever the task; another call is another."""
    call = IN_A_TASK._replace(invocation="tools:1")
    assert call.run() == call._replace(task_id="another", checkpoint_ns="tools:1|node:2").run()
    others = [
        call._replace(invocation="tools:2"),
        call._replace(run_thread_id="8"),
        call._replace(invocation=""),
    ]
    assert len({each.run() for each in (call, *others)}) == 4


def test_outside_of_a_graph_nothing_is_known() -> None:
    """Where a hook is called directly there is neither agent nor thread, and no error."""
    assert call_context(None, model_name=None) == CallContext()
    assert call_context(Runtime(), model_name="boss") == CallContext()


class Nothing(TypedDict, total=False):
    """A state without keys."""

    unused: int


class Seen:
    """A graph with one node, which reads its context."""

    def __init__(self, **options: Any) -> None:
        self.contexts: list[CallContext] = []

        def node(state: Nothing, runtime: Runtime[Any]) -> dict[str, int]:
            self.contexts.append(call_context(runtime, model_name=None))
            return {"unused": 1}

        graph = StateGraph(Nothing)
        graph.add_node("node", node)
        graph.add_edge(START, "node")
        graph.add_edge("node", END)
        self.graph = graph.compile(**options)

    def run(self, config: RunnableConfig | None = None) -> CallContext:
        self.graph.invoke({}, config)
        return self.contexts[-1]


def test_in_a_graph() -> None:
    """A hook's agent, thread and task are those of its run; the next run has steps of its own."""
    config: RunnableConfig = {
        "configurable": {"thread_id": 7},
        "metadata": {"lc_agent_name": "boss"},
    }
    seen = Seen(checkpointer=InMemorySaver())
    found = seen.run(config)
    assert (found.agent, found.thread_id, found.run_thread_id) == ("boss", 7, 7)
    assert found.task_id is not None
    assert found.checkpoint_ns.startswith("node:")
    assert found.remembers
    assert seen.run(config).step("QuotaMiddleware") != found.step("QuotaMiddleware")


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
    callers: list[CallContext] = []

    def call(state: Nothing, runtime: Runtime[Any]) -> dict[str, int]:
        callers.append(call_context(runtime, model_name=None))
        child.run()
        child.run()
        return {"unused": 1}

    graph = StateGraph(Nothing)
    graph.add_node("call", call)
    graph.add_edge(START, "call")
    config: RunnableConfig = {"configurable": {"thread_id": "7"}}
    graph.compile(checkpointer=InMemorySaver() if remembers else None).invoke({}, config)

    assert [each.invocation for each in callers] == [""]
    assert [each.is_nested for each in (*callers, *child.contexts)] == [False, True, True]
    first, second = (each.invocation for each in child.contexts)
    if remembers:
        assert first.startswith("call:")
        assert second == f"{first}|1"
    else:
        assert (first, second) == ("", "")
    assert child.contexts[0].run() != child.contexts[1].run()


WHAT = "quota 'daily' of limit 'tool:email'"
ID = UUID("12345678-1234-5678-1234-567812345678")
CALLER = CallContext("boss", None, run_thread_id=7)


@dataclass(frozen=True)
class With:
    """A runtime with a context."""

    context: Any


@dataclass(frozen=True)
class User:
    user_id: Any


@pytest.mark.parametrize(
    ("per", "runtime", "subject"),
    [
        ("global", None, ""),
        # Of the whole run, also inside another agent's tool.
        ("thread", None, "7"),
        ("agent", None, "boss"),
        ("user_id", With({"user_id": "ann"}), "ann"),
        ("user_id", With(User("ann")), "ann"),
    ],
)
def test_whose_calls_are_counted(per: str, runtime: object, subject: str) -> None:
    """All calls, the thread's, the agent's, or those of a value in a mapping or an object."""
    assert subject_of(WHAT, per, runtime, CALLER) == subject


@pytest.mark.parametrize(
    "runtime",
    [None, With(None), With({}), With({"user_id": None}), With(User(None)), With(5)],
    ids=["no runtime", "no context", "no value", "None", "None as attribute", "a number"],
)
def test_a_context_without_the_value_is_refused(runtime: object) -> None:
    """A missing subject is never counted: the error names the quota, the value and the remedy."""
    with pytest.raises(
        ValueError, match=r"needs 'user_id' in runtime\.context: .*context="
    ) as caught:
        subject_of(WHAT, "user_id", runtime, CALLER)
    assert WHAT in str(caught.value)


def test_a_mapping_is_read_by_key_only() -> None:
    """The methods of a dict are no values of the context."""
    with pytest.raises(ValueError, match=r"needs 'items' in runtime\.context"):
        subject_of(WHAT, "items", With({"user_id": "ann"}), CALLER)


@pytest.mark.parametrize(
    ("per", "caller", "remedy"),
    [
        ("thread", CallContext("boss"), r"this run has none: .*thread_id"),
        ("agent", CallContext(None, run_thread_id=7), r"create_agent\(name="),
        ("agent", CallContext("", run_thread_id=7), r"create_agent\(name="),
    ],
)
def test_a_caller_that_is_not_known_is_refused(per: str, caller: CallContext, remedy: str) -> None:
    """Runs without a thread, and agents without a name, are not counted as one."""
    with pytest.raises(ValueError, match=remedy) as caught:
        subject_of(WHAT, per, None, caller)
    assert WHAT in str(caught.value)


@pytest.mark.parametrize(
    ("value", "text"), [(" ann ", " ann "), (0, "0"), (10**30, str(10**30)), (ID, str(ID))]
)
def test_the_text_of_a_subject(value: object, text: str) -> None:
    """Strings are kept as they are; numbers and UUIDs, of which equal ones have one text, too."""
    assert checked_subject(WHAT, value) == text


@pytest.mark.parametrize("value", [True, 2.5, b"ann", ["ann"], User("ann")], ids=repr)
def test_a_subject_of_a_wrong_type_is_refused(value: object) -> None:
    """The error names the quota and the type, and not the value, which may be anybody's."""
    with pytest.raises(TypeError, match="a string, a whole number or a UUID") as caught:
        subject_of(WHAT, "user_id", With({"user_id": value}), CALLER)
    assert WHAT in str(caught.value)
    assert str(caught.value).endswith(f"not {type(value).__name__}")


def test_an_empty_subject_is_refused() -> None:
    """A user without an id is not everybody."""
    with pytest.raises(ValueError, match="must not be empty") as caught:
        checked_subject(WHAT, "")
    assert WHAT in str(caught.value)


STATE = {"plan": 3, "langchain_quota": {"run": "r1"}}
BONUS = With({"bonus": 2})
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)
TODAY = f"86400:{NOON.timestamp() // 86400:.0f}"


def plan(state: Any, runtime: Any) -> int:
    return int(state["plan"]) + int(runtime.context["bonus"])


async def async_plan(state: Any, runtime: Any) -> int:
    await asyncio.sleep(0)
    return plan(state, runtime)


class AsyncPlan:
    """An object that is called, with a method that is awaited."""

    async def __call__(self, state: Any, runtime: Any) -> int:
        return plan(state, runtime)


def failing(state: Any, runtime: Any) -> int:
    raise LookupError("no such tenant")


async def async_failing(state: Any, runtime: Any) -> int:
    raise LookupError("no such tenant")


@dataclass(frozen=True)
class Run:
    """What LangGraph says to a hook of the run."""

    thread_id: object
    checkpoint_ns: str = "node:task"
    task_id: str = "task"


@dataclass(frozen=True)
class OnThread:
    """The runtime of a hook that runs on a thread."""

    context: Any
    execution_info: Run = Run(7)


ANN = OnThread({"user_id": "ann", "plan": "pro"})
NOWHERE = OnThread({}, Run(None))


def tenant(state: Any, runtime: Any) -> object:
    return runtime.context["user_id"].upper()


async def async_tenant(state: Any, runtime: Any) -> object:
    await asyncio.sleep(0)
    return tenant(state, runtime)


def shared(
    limit: Limit, signals: Signals, runtime: Any = ANN, now: datetime = NOON
) -> ResolvedLimit:
    """A limit as it is where a store keeps counts."""
    (resolved,) = resolve([limit], STATE, runtime, signals.recorder, now=now.timestamp())
    return resolved


async def ashared(limit: Limit, signals: Signals, runtime: Any = ANN) -> ResolvedLimit:
    """The same under the async hooks."""
    now = NOON.timestamp()
    (resolved,) = await aresolve([limit], STATE, runtime, signals.recorder, now=now)
    return resolved


async def test_functions_are_called_with_state_and_runtime(signals: Signals) -> None:
    """On either path the limits have what their functions give now, in their order."""
    limits: list[Limit] = [
        ToolCallLimit("search", thread_limit=plan, run_limit=2),
        ToolCallLimit(run_limit=9),
        # At this moment there is no limit.
        ToolCallLimit("ask", run_limit=lambda *_: None),
        ModelCallLimit(run_limit=lambda state, _: state["plan"]),
    ]
    expected = [
        ResolvedLimit(limits[0], 5, 2, computed=("thread",)),
        ResolvedLimit(limits[1], None, 9),
        ResolvedLimit(limits[2], None, None, computed=("run",)),
        ResolvedLimit(limits[3], None, 3, computed=("run",)),
    ]
    assert resolve(limits, STATE, BONUS, signals.recorder) == expected
    assert await aresolve(limits, STATE, BONUS, signals.recorder) == expected


def promised(state: Any, runtime: Any) -> Awaitable[int]:
    """Gives a future."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.set_result(plan(state, runtime))
    return future


@pytest.mark.parametrize(
    "function",
    [async_plan, AsyncPlan(), lambda state, _: async_plan(state, BONUS), promised],
    ids=["function", "object", "lambda", "future"],
)
async def test_async_functions_need_async_methods(function: Any, signals: Signals) -> None:
    """Whatever gives an awaitable is awaited; under the sync hooks the error says what to do."""
    limit = ToolCallLimit(run_limit=function, thread_limit=plan, name="plan")
    (resolved,) = await aresolve([limit], STATE, BONUS, signals.recorder)
    assert (resolved.thread_limit, resolved.run_limit) == (5, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match=r"run_limit of limit 'plan' is async: .*ainvoke"):
            resolve([limit], STATE, BONUS, signals.recorder)
        gc.collect()
    # Nobody reads of a coroutine that was never awaited, beside the error. What other tests left
    # to the garbage collector may show up here, too.
    assert [each for each in caught if "never awaited" in str(each.message)] == []


@pytest.mark.parametrize(
    "quota",
    [Quota(async_plan, per="global"), Quota(1, per=async_tenant, name="global_tenant")],
    ids=["limit", "per"],
)
def test_async_functions_of_quotas_need_async_methods(quota: Quota, signals: Signals) -> None:
    """Under the sync hooks the error says which argument of which limit is async."""
    argument = "limit" if callable(quota.limit) else "per"
    with pytest.raises(RuntimeError, match=rf"{argument} of limit 'tool:\*' is async: .*ainvoke"):
        shared(ToolCallLimit(quotas=[quota]), signals)


@pytest.mark.parametrize(
    ("arguments", "aarguments"),
    [
        ({"run_limit": failing}, {"run_limit": async_failing}),
        ({"quotas": [Quota(failing, per="global")]}, {"quotas": [Quota(async_failing)]}),
        ({"quotas": [Quota(1, per=failing, name="tenant")]}, {"run_limit": failing}),
    ],
    ids=["limit", "quota", "subject"],
)
async def test_a_function_that_raises(arguments: Any, aarguments: Any, signals: Signals) -> None:
    """The error reaches the caller, from either path, says whose it is, and is counted."""
    with pytest.raises(LookupError, match="no such tenant") as caught:
        shared(ToolCallLimit(**arguments), signals)
    with pytest.raises(LookupError, match="no such tenant") as acaught:
        await ashared(ToolCallLimit(**aarguments), signals)
    for error in (caught.value, acaught.value):
        (note,) = error.__notes__
        assert re.fullmatch(r"raised by the function for \w+ of limit 'tool:\*'", note)
    errors = "langchain_quota_errors_total"
    assert signals.value(errors, component="dynamic_limit", error_type="LookupError") == 2


@pytest.mark.parametrize(
    ("value", "error"), [(True, TypeError), (2.5, TypeError), ("3", TypeError), (-1, ValueError)]
)
async def test_a_computed_number_is_checked(
    value: Any, error: type[Exception], signals: Signals
) -> None:
    """One out of bounds fails the run with an error that names the limit and the value."""
    limit = ToolCallLimit(run_limit=lambda *_: value, name="plan")
    quota = ToolCallLimit(quotas=[Quota(lambda *_: value, per="user_id")], name="plan")
    for each, what in ((limit, "run_limit"), (quota, "limit of quota 'user_id'")):
        with pytest.raises(error, match=f"{what} of limit 'plan'") as caught:
            shared(each, signals)
        assert repr(value) in str(caught.value)
        with pytest.raises(error, match=f"{what} of limit 'plan'"):
            await ashared(each, signals)


@pytest.mark.parametrize(("value", "error"), [(None, TypeError), ("", ValueError)])
def test_a_computed_subject_is_checked(
    value: Any, error: type[Exception], signals: Signals
) -> None:
    """A function without a subject fails the run; its calls are not counted for everybody."""
    limit = ToolCallLimit(quotas=[Quota(5, per=lambda *_: value, name="tenant")], name="plan")
    with pytest.raises(error, match="the subject of quota 'tenant' of limit 'plan'"):
        shared(limit, signals)


async def test_quotas_are_resolved(signals: Signals) -> None:
    """Each has its number, subject, key and end of window at this moment, on either path.

    A number of `None` is no quota, and then nobody is asked whose it is.
    """
    limit = ToolCallLimit(
        "email",
        quotas=[
            Quota(5, per="user_id", window=DAY),
            Quota(lambda state, _: state["plan"], per="global"),
            Quota(7, per=tenant, name="tenant"),
            Quota(lambda *_: None, per="unknown"),
        ],
    )
    resolved = shared(limit, signals)
    assert resolved.quotas == (
        ResolvedQuota(
            "user_id",
            5,
            "ann",
            f"email:user_id:ann:{TODAY}",
            datetime(2026, 1, 2, tzinfo=UTC),
            per="user_id",
        ),
        ResolvedQuota("global", 3, "", "email:global:", per="global", computed=True),
        ResolvedQuota("tenant", 7, "ANN", "email:tenant:ANN", per="tenant"),
    )
    assert resolved.computed == ("global",)
    assert await ashared(limit, signals) == resolved
    awaited = replace(limit, quotas=[Quota(7, per=async_tenant, name="tenant")])
    assert (await ashared(awaited, signals)).quotas == resolved.quotas[2:]


def test_without_a_store_there_are_no_keys(signals: Signals) -> None:
    """Where no store is, nobody's id is asked for."""
    limit = ToolCallLimit(thread_limit=3, quotas=[Quota(5, per="user_id")])
    assert resolve([limit], STATE, BONUS, signals.recorder) == [ResolvedLimit(limit, 3, None)]


def test_a_threads_key(signals: Signals) -> None:
    """A thread limit and a quota per thread without a window are kept under one key.

    Without a thread's id its count stays in the state; a quota per thread is refused.
    """
    limit = ToolCallLimit("search", thread_limit=3, run_limit=2)
    quota = ToolCallLimit("search", quotas=[Quota(5)])
    assert shared(limit, signals).thread_key == "search:thread:7"
    (per_thread,) = shared(quota, signals).quotas
    assert per_thread == ResolvedQuota("thread", 5, "7", "search:thread:7", per="thread")
    assert shared(quota, signals).thread_key is None
    assert shared(limit, signals, NOWHERE).thread_key is None
    with pytest.raises(ValueError, match="quota 'thread' of limit 'tool:search' is per thread"):
        shared(quota, signals, NOWHERE)


def test_a_runs_key(signals: Signals) -> None:
    """A run limit is kept under the run's name, on any thread or none; other limits are not."""
    limit = ToolCallLimit("search", thread_limit=3, run_limit=2)
    assert shared(limit, signals).run_key == "search:run:r1"
    assert shared(limit, signals, NOWHERE).run_key == "search:run:r1"
    assert shared(ModelCallLimit(run_limit=2), signals).run_key == "model:run:r1"
    assert shared(ToolCallLimit(thread_limit=3), signals).run_key is None


@pytest.mark.parametrize("known", [{}, {"run": None}], ids=["begun before", "reset"])
def test_a_run_without_a_name_has_no_key(known: Any, signals: Signals) -> None:
    """What began before runs had names, or was reset, is counted by the state alone."""
    limit = ToolCallLimit(run_limit=3)
    state = {"langchain_quota": known}
    (resolved,) = resolve([limit], state, ANN, signals.recorder, now=NOON.timestamp())
    assert (resolved.run_key, resolved.shared) == (None, False)


def test_windows_follow_each_other(signals: Signals) -> None:
    """At the edge of a window the key is another one, and the reset is the next edge."""
    limit = ToolCallLimit("search", quotas=[Quota(5, per="global", window=DAY)])
    edge = datetime(2026, 1, 2, tzinfo=UTC)
    (before,) = shared(limit, signals, now=edge - timedelta(microseconds=1)).quotas
    (after,) = shared(limit, signals, now=edge).quotas
    assert (before.resets_at, after.resets_at) == (edge, edge + DAY)
    assert before.key != after.key


def test_what_is_counted_apart_has_keys_apart(signals: Signals) -> None:
    """Other calls, other subjects, other windows: none shares a count with another."""
    hour = timedelta(hours=1)
    limits: list[Limit] = [
        ModelCallLimit(thread_limit=1, quotas=[Quota(1, per="user_id")]),
        ToolCallLimit("model", thread_limit=1, quotas=[Quota(1, per="user_id")]),
        ToolCallLimit(thread_limit=1, quotas=[Quota(1, per="user_id")]),
        ToolCallLimit(exclude=["model"], quotas=[Quota(1, per="user_id"), Quota(1, per="plan")]),
        ToolCallLimit(
            "search",
            quotas=[Quota(1), Quota(1, window=DAY, name="day"), Quota(1, window=hour, name="hour")],
        ),
    ]
    found = [shared(limit, signals) for limit in limits]
    kept = [each.thread_key for each in found if each.thread_key]
    kept += [quota.key for each in found for quota in each.quotas]
    assert len(kept) == len(set(kept)) == 11


@pytest.mark.parametrize("tool", ["search", "model"])
def test_a_reset_finds_what_is_counted(tool: str, signals: Signals) -> None:
    """A thread's reset names the very keys under which its calls are counted, and no others."""
    daily = Quota(5, window=DAY, name="daily")
    limits: Sequence[Limit] = [
        ToolCallLimit(tool, thread_limit=9, quotas=[daily, Quota(5, per="global", window=DAY)]),
        ModelCallLimit(quotas=[Quota(5)]),
    ]
    first, second = (shared(limit, signals) for limit in limits)
    found = thread_keys(limits, {"configurable": {"thread_id": "7"}}, NOON.timestamp())
    keys = [str(first.thread_key), first.quotas[0].key, second.quotas[0].key]
    assert found == sorted(keys)

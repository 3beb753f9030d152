"""Quotas in a store: whose calls are counted together, until when, and who is refused."""

from dataclasses import dataclass
from typing import Any

import pytest

from langchain_quota import ModelCallLimit, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.quotas import Quota
from langchain_quota.stores.memory import MemoryStore
from tests.calls import calls_made
from tests.scene import ANN, Form, Scene, asking, both_forms
from tests.signals import Signals
from tests.stores import DAY, NOON, TODAY, Clock, counts, quota

USER = Quota(2, per="user_id", window=DAY)


@dataclass
class Context:
    """What a run knows of its caller."""

    user_id: str | None = None
    tenant: str = "acme"


def scene_of(
    signals: Signals, store: MemoryStore, *limits: Limit, form: Form = "async", **options: Any
) -> Scene:
    """An agent that searches three times in each run."""
    return Scene(
        signals,
        asking("search", "search", "search"),
        [quota(signals, *limits, store=store)],
        **options,
        form=form,
    )


async def test_per_thread_with_a_window(signals: Signals) -> None:
    """A thread may have a quota with a window and a limit without one."""
    store, clock = MemoryStore(), Clock()
    limit = ToolCallLimit(
        "search", quotas=[Quota(2, window=DAY), Quota(5, name="session", per=lambda s, r: "all")]
    )
    scene = Scene(
        signals,
        asking("search", "search", "search"),
        [quota(signals, limit, store=store, clock=clock)],
    )

    await scene.play()
    await scene.play()
    assert scene.ran == ["search"] * 2
    await scene.play(thread_id="thread-2")
    assert scene.ran == ["search"] * 4
    clock.now += 43_260
    await scene.play(thread_id="thread-1")

    assert scene.ran == ["search"] * 5
    assert counts(store) == {
        f"search:thread:thread-1:{TODAY}": 2,
        f"search:thread:thread-2:{TODAY}": 2,
        "search:thread:thread-1:86400:20455": 1,
        "search:session:all": 5,
    }


def tenant(state: Any, runtime: Any) -> str:
    return str(runtime.context["tenant"])


async def atenant(state: Any, runtime: Any) -> str:
    return tenant(state, runtime)


@both_forms
@pytest.mark.parametrize("function", ["sync", "async"])
async def test_per_function(form: Form, function: str, signals: Signals) -> None:
    """A function says whose calls are counted; an async one needs the agent's async methods."""
    store = MemoryStore()
    per = tenant if function == "sync" else atenant
    scene = scene_of(
        signals,
        store,
        ToolCallLimit("search", quotas=[Quota(2, per=per, name="tenant")]),
        form=form,
    )

    if form == "sync" and function == "async":
        with pytest.raises(
            RuntimeError, match="per of limit 'tool:search' is async: call the agent with ainvoke"
        ):
            await scene.play(context={"tenant": "acme"})
        assert (scene.ran, counts(store)) == ([], {})
        return
    await scene.play(context={"tenant": "acme"})
    await scene.play(context={"tenant": "acme"}, thread_id="thread-2")
    await scene.play(context={"tenant": "umbrella"})

    assert scene.ran == ["search"] * 4
    assert counts(store) == {"search:tenant:acme": 2, "search:tenant:umbrella": 2}
    assert scene.metric("tool:search", "blocked", "tenant") == 5


async def test_a_function_that_raises(signals: Signals) -> None:
    """What a quota's function raises reaches the caller, is counted, and charges nothing."""
    store = MemoryStore()
    scene = scene_of(
        signals, store, ToolCallLimit("search", quotas=[Quota(2, per=tenant, name="tenant")])
    )

    with pytest.raises(KeyError, match="tenant"):
        await scene.play(context=ANN)

    assert (scene.ran, counts(store)) == ([], {})
    labels = {"component": "dynamic_limit", "error_type": "KeyError"}
    assert signals.value("langchain_quota_errors_total", **labels) == 1


PLANS = {"ann": 1, "bob": 3, "root": None}


def plan(state: Any, runtime: Any) -> int | None:
    return PLANS[runtime.context["user_id"]]


async def aplan(state: Any, runtime: Any) -> int | None:
    return plan(state, runtime)


@both_forms
@pytest.mark.parametrize("function", ["sync", "async"])
async def test_a_computed_quota(form: Form, function: str, signals: Signals) -> None:
    """A quota's number can be a function; `None` is no quota, and then nothing is counted."""
    store = MemoryStore()
    number = plan if function == "sync" else aplan
    scene = scene_of(
        signals, store, ToolCallLimit("search", quotas=[Quota(number, per="user_id")]), form=form
    )

    if form == "sync" and function == "async":
        with pytest.raises(RuntimeError, match="limit of limit 'tool:search' is async"):
            await scene.play(context=ANN)
        assert (scene.ran, counts(store)) == ([], {})
        return
    for user in PLANS:
        await scene.play(context={"user_id": user}, thread_id=user)

    assert len(scene.ran) == 1 + 3 + 3
    assert counts(store) == {"search:user_id:ann": 1, "search:user_id:bob": 3}
    # A number that was computed is not exported as the limit.
    labels = {"agent": "unnamed", "limit": "tool:search", "scope": "user_id"}
    assert signals.value("langchain_quota_limit", **labels) is None


@pytest.mark.parametrize(
    ("number", "error", "says"),
    [
        (-1, ValueError, "limit of quota 'user_id' of limit 'tool:search' must be 0 or more"),
        (2.5, TypeError, "limit of quota 'user_id' of limit 'tool:search' must be a whole number"),
    ],
)
async def test_a_wrong_computed_quota(
    number: Any, error: type[Exception], says: str, signals: Signals
) -> None:
    """A computed number that is none is an error at the call that it is for."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[Quota(lambda s, r: number, per="user_id")])
    scene = scene_of(signals, store, limit)

    with pytest.raises(error, match=says):
        await scene.play(context=ANN)

    assert (scene.ran, counts(store)) == ([], {})


NEEDS = (
    "quota 'user_id' of limit {limit!r} needs 'user_id' in runtime.context: call the agent with "
    'context={{"user_id": …}}, or an object that has it'
)
WRONG = (
    "the subject of quota 'user_id' of limit {limit!r} must be a string, a whole number or a UUID, "
    "not {type}"
)
EMPTY = "the subject of quota 'user_id' of limit {limit!r} must not be empty"

REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no context": (None, ValueError, NEEDS),
    "missing": ({"tenant": "acme"}, ValueError, NEEDS),
    "None": ({"user_id": None}, ValueError, NEEDS),
    "None in a dataclass": (Context(), ValueError, NEEDS),
    "float": ({"user_id": 7.0}, TypeError, WRONG.replace("{type}", "float")),
    "bool": ({"user_id": True}, TypeError, WRONG.replace("{type}", "bool")),
    "list": ({"user_id": ["ann"]}, TypeError, WRONG.replace("{type}", "list")),
    "bytes": ({"user_id": b"ann"}, TypeError, WRONG.replace("{type}", "bytes")),
    "empty": ({"user_id": ""}, ValueError, EMPTY),
}


@pytest.mark.parametrize(
    ("kind", "case"), [("model", "no context"), *(("tool", each) for each in REFUSED)]
)
async def test_a_refused_context(kind: str, case: str, signals: Signals) -> None:
    """A context that does not tell the user is an error; nothing is charged, and no tool runs."""
    context, error, says = REFUSED[case]
    store = MemoryStore()
    limit: Limit = (
        ToolCallLimit("search", quotas=[USER]) if kind == "tool" else ModelCallLimit(quotas=[USER])
    )
    scene = scene_of(signals, store, limit)

    with pytest.raises(error) as caught:
        await scene.play(context=context)

    assert str(caught.value) == says.format(limit=limit.name)
    assert counts(store) == {}
    assert scene.ran == []
    assert len(scene.model.calls) == (1 if kind == "tool" else 0)
    assert scene.metric(limit.name, "allowed") == 0
    # The thread is whole: whoever says who they are goes on.
    await scene.play(context=ANN)
    assert len(scene.ran) == (2 if kind == "tool" else 3)
    scene.check_requests()


@pytest.mark.parametrize("kind", ["tool", "model"])
async def test_per_agent_without_a_name(kind: str, signals: Signals) -> None:
    """A quota per agent needs an agent with a name."""
    store = MemoryStore()
    per_agent = Quota(2, per="agent")
    limit: Limit = (
        ToolCallLimit("search", quotas=[per_agent])
        if kind == "tool"
        else ModelCallLimit(quotas=[per_agent])
    )
    scene = scene_of(signals, store, limit)

    with pytest.raises(ValueError, match="per agent") as caught:
        await scene.play()

    assert str(caught.value) == (
        f"quota 'agent' of limit {limit.name!r} is per agent, and this one has no name: "
        "create_agent(name=…)"
    )
    assert (scene.ran, counts(store)) == ([], {})


@pytest.mark.parametrize("kind", ["tool", "model"])
async def test_per_thread_without_a_thread(kind: str, signals: Signals) -> None:
    """A quota per thread needs a run with a thread."""
    store = MemoryStore()
    per_thread = Quota(2, window=DAY)
    limit: Limit = (
        ToolCallLimit("search", quotas=[per_thread])
        if kind == "tool"
        else ModelCallLimit(quotas=[per_thread])
    )
    scene = scene_of(signals, store, limit, checkpointer=None)

    with pytest.raises(ValueError, match="per thread") as caught:
        await scene.play(thread_id=None)

    assert str(caught.value) == (
        f"quota 'thread' of limit {limit.name!r} is per thread, and this run has none: call the "
        'agent with {"configurable": {"thread_id": …}}'
    )
    assert (scene.ran, counts(store)) == ([], {})


HOSTILE = [
    "ann",
    "ann:86400:20454",
    "ann%3A86400%3A20454",
    "Ann",
    "*",
    "{ann}",
    "ann\n",
    "\ud800",
    "ä" * 1000,
    "ä" * 1001,
]


async def test_users_that_look_alike(signals: Signals) -> None:
    """No user's id, however it is written, reaches the count of another."""
    store = MemoryStore()
    scene = scene_of(signals, store, ToolCallLimit("search", quotas=[USER]))

    for user in HOSTILE:
        await scene.play(context={"user_id": user})

    assert len(scene.ran) == 2 * len(HOSTILE)
    assert list(counts(store).values()) == [2] * len(HOSTILE)


async def test_the_edge_of_a_window(signals: Signals) -> None:
    """In a window's last second its count still holds; at its edge the next one begins at 0."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    scene = Scene(
        signals,
        asking("search", "search", "search"),
        [quota(signals, ToolCallLimit("search", quotas=[USER]), store=store, clock=clock)],
    )

    await scene.play(context=ANN)
    clock.now = NOON + 43_199.999
    await scene.play()
    assert scene.ran == ["search"] * 2
    clock.now = NOON + 43_200
    await scene.play()
    await scene.play()

    assert scene.ran == ["search"] * 4
    assert counts(store) == {
        f"search:user_id:ann:{TODAY}": 2,
        "search:user_id:ann:86400:20455": 2,
    }


def test_long_ids_cost_no_more_calls(signals: Signals) -> None:
    """A megabyte of a thread id and of a user id is not looked at character by character."""
    store = MemoryStore()
    daily = Quota(9, per="thread", window=DAY, name="daily")
    limits: list[Limit] = [
        ToolCallLimit("search", thread_limit=9, quotas=[USER, daily]),
        ModelCallLimit(thread_limit=9, quotas=[Quota(9, per="user_id")]),
    ]
    scene = scene_of(signals, store, *limits, context_schema=dict, form="sync")

    def calls_with(an_id: str) -> int:
        config: Any = {"configurable": {"thread_id": an_id}}
        given: Any = {"messages": [("user", "hi")]}
        return calls_made(lambda: scene.agent.invoke(given, config, context={"user_id": an_id}))

    calls_with("warm")
    short, long = calls_with("é:\n" * 1_000), calls_with("é:\n" * 500_000)

    assert long < 1.1 * short
    assert len(store.usages()) == 15

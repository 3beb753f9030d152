"""Quotas and thread limits in a store: whose calls are counted, and what a used up one does."""

import gc
from collections import Counter
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest

from langchain_quota import MemoryStore, ModelCallLimit, Quota, ToolCallLimit, usage
from langchain_quota.limits import Limit
from tests.scene import ANN, CONFIG, Form, Scene, asking, both_forms
from tests.stores import DAY, TODAY, Clock, counts
from tests.telemetry import Signals


@dataclass
class Context:
    """What a run knows of its caller."""

    user_id: UUID | None = None


USER = Quota(2, per="user_id", window=DAY)
THREE = asking("search", "search", "search")
PLANS = {"acme": 1, "umbrella": 3, "root": None}


def tenant(_: Any, runtime: Any) -> str:
    return str(runtime.context["tenant"])


async def atenant(state: Any, runtime: Any) -> str:
    return tenant(state, runtime)


def plan(_: Any, runtime: Any) -> int | None:
    return PLANS[runtime.context["tenant"]]


async def aplan(state: Any, runtime: Any) -> int | None:
    return plan(state, runtime)


@pytest.mark.parametrize(
    ("form", "per", "number"),
    [("sync", tenant, plan), ("async", tenant, plan), ("async", atenant, aplan)],
)
async def test_functions(form: Form, per: Any, number: Any, signals: Signals) -> None:
    """A function says whose calls are counted, and how many; `None` is no limit."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[Quota(number, per=per, name="tenant")])
    scene = Scene(signals, THREE, [limit], store=store, form=form)
    for name in PLANS:
        await scene.play(context={"tenant": name}, thread_id=name)
    assert len(scene.ran) == 1 + 3 + 3
    assert counts(store) == {f"search:tenant:{name}": n or 3 for name, n in PLANS.items()}
    assert scene.metric("tool:search", "blocked", "tenant") == 2
    # A number that was computed is not exported as the limit.
    labels = {"agent": "unnamed", "limit": "tool:search", "scope": "tenant"}
    assert signals.samples("langchain_quota_limit", **labels) == {}


class APlan:
    """An object that is called like an async function."""

    async def __call__(self, state: Any, runtime: Any) -> int | None:
        return plan(state, runtime)


ACME = {"tenant": "acme"}
ASYNC = "{} of limit '.*' is async: call the agent with ainvoke"
NUMBER = "limit of quota 'global' of limit 'tool:search' must be "
NEEDS = (
    "quota 'user_id' of limit 'tool:search' needs 'user_id' in runtime.context: call the agent "
    'with context={"user_id": …}, or an object that has it'
)
WRONG = (
    "the subject of quota 'user_id' of limit 'tool:search' must be a string, a whole number or a "
    "UUID, "
)


@pytest.mark.parametrize(
    ("counted", "context", "error", "says"),
    [
        (ModelCallLimit(run_limit=aplan), ACME, RuntimeError, ASYNC.format("run_limit")),
        (ToolCallLimit("search", run_limit=APlan()), ACME, RuntimeError, ASYNC.format("run_limit")),
        (Quota(2, per=atenant, name="who"), ACME, RuntimeError, ASYNC.format("per")),
        (Quota(aplan, per="global"), ACME, RuntimeError, ASYNC.format("limit")),
        (Quota(2, per=tenant, name="who"), ANN, KeyError, "tenant"),
        (Quota(lambda *_: -1, per="global"), ACME, ValueError, NUMBER + "0 or more"),
        (USER, None, ValueError, NEEDS),
        (USER, ACME, ValueError, NEEDS),
        (USER, Context(), ValueError, NEEDS),
        (USER, {"user_id": 7.0}, TypeError, WRONG + "not float"),
        (USER, {"user_id": True}, TypeError, WRONG + "not bool"),
        (USER, {"user_id": b"ann"}, TypeError, WRONG + "not bytes"),
        (USER, {"user_id": ""}, ValueError, "must not be empty"),
        (Quota(2, per="agent"), None, ValueError, "is per agent, and this one has no name"),
        (Quota(2, per="thread"), None, ValueError, "is per thread, and this run has none"),
    ],
)
async def test_what_tells_no_count(
    counted: Limit | Quota, context: Any, error: type[Exception], says: str, signals: Signals
) -> None:
    """Whoever cannot be told apart is an error that says why; nothing is charged, or runs."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[counted]) if isinstance(counted, Quota) else counted
    nowhere: Any = {"thread_id": None, "checkpointer": None}
    scene = Scene(signals, THREE, [limit], store=store, form="sync", context=context, **nowhere)
    with pytest.raises(error, match=says):
        await scene.play()
    assert (scene.ran, counts(store)) == ([], {})
    assert scene.metric("tool:search", "allowed") == 0
    if error is KeyError:
        assert signals.errors("dynamic_limit", "KeyError") == 1
    gc.collect(1)  # a coroutine that was never awaited warns here, and warnings are errors


async def test_a_threads_quota_in_a_full_store(signals: Signals) -> None:
    """A full store drops a thread's count that has no window: the thread's state has it, too."""
    limit = ToolCallLimit("search", quotas=[Quota(2, per="thread")])
    scene = Scene(signals, asking("search"), [limit], store=MemoryStore(max_keys=1))
    for thread_id in "12121":
        await scene.play(thread_id=thread_id)
    assert len(scene.ran) == 4


THREAD = "search:thread:thread-1"


@both_forms
async def test_reset(form: Form, signals: Signals) -> None:
    """A reset gives a thread its budget back, in state and store, and touches nobody else."""
    store = MemoryStore(clock=Clock())
    limits: list[Limit] = [
        ToolCallLimit("search", thread_limit=2, run_limit=2, quotas=[Quota(5, per="user_id")]),
        ToolCallLimit("calc", quotas=[Quota(1, per="thread", window=DAY)]),
        ModelCallLimit(thread_limit=9),
    ]
    scene = Scene(signals, asking("search", "search", "calc"), limits, store=store, form=form)
    await scene.play(context=Context(UUID(int=7)), thread_id="thread-2")
    await scene.play(thread_id="thread-1")
    await scene.play()
    assert len(scene.ran) == 6
    await scene.reset()
    used = usage(scene.agent.get_state(CONFIG))
    assert (dict(used.tools), used.model, dict(used.run_tools)) == ({}, 0, {})
    assert counts(store) == {
        f"search:user_id:{UUID(int=7)}": 4,
        "search:thread:thread-2": 2,
        f"calc:thread:thread-2:{TODAY}": 1,
        "model:thread:thread-2": 2,
    }
    seconds = "langchain_quota_store_seconds_count"
    assert list(signals.samples(seconds, operation="reset", outcome="ok").values()) == [1]
    await scene.play()
    assert Counter(scene.ran) == {"search": 5, "calc": 3}  # of five searches a user has no more
    assert counts(store)[THREAD] == 1

"""Functions of the agent's state and runtime: numbers of limits, and the prefix of a store."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from langchain_quota import (
    ConcurrencyLimit,
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    RedisStore,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from tests.scene import CONFIG, Form, Kind, Scene, asking, both_forms, either
from tests.stores import FickleStore, counts
from tests.telemetry import Signals


class PlanError(Exception):
    """The plan cannot be found."""


def by_plan(state: Any, runtime: Any) -> int | None:
    plan = runtime.context["plan"]
    if plan == "unknown":
        raise PlanError("the plans are down")
    return {"free": 1, "pro": 3, "unlimited": None}[plan]


async def aby_plan(state: Any, runtime: Any) -> int | None:
    return by_plan(state, runtime)


class ByPlan:
    """An object that is called like an async function."""

    async def __call__(self, state: Any, runtime: Any) -> int | None:
        return by_plan(state, runtime)


functions = pytest.mark.parametrize(
    ("form", "function"),
    [("sync", by_plan), ("async", by_plan), ("async", aby_plan), ("async", ByPlan())],
    ids=["sync", "sync in async", "async", "async object"],
)


async def test_a_number_that_follows_from_the_state(signals: Signals) -> None:
    """It is computed for each call, and not once for a run."""
    limit = ToolCallLimit("search", run_limit=lambda state, _: 1 + (len(state["messages"]) < 3))
    scene = await Scene(signals, [["search"], ["search"], "done"], [limit]).played()
    assert scene.ran == ["search"]


@functions
async def test_a_plan_that_changes(form: Form, function: Any, signals: Signals) -> None:
    """A thread keeps its count, and is checked by the plan of each turn; `None` is no limit."""
    limits: list[Limit] = [
        ToolCallLimit("search", thread_limit=function),
        ModelCallLimit(run_limit=lambda state, runtime: 2, thread_limit=99),
    ]
    scene = Scene(signals, asking(*["search"] * 3), limits, form=form)
    ran = []
    for plan in ("free", "pro", "free", "unlimited"):
        await scene.play(context={"plan": plan})
        ran.append(len(scene.ran))
    assert ran == [1, 3, 3, 6]
    gauges = signals.samples("langchain_quota_limit", agent="unnamed")
    assert gauges == {("model", "thread", "calls"): 99}
    exhausted = signals.samples("langchain_quota_crossings_total", level="exhausted")
    assert exhausted["unnamed", "tool:search", "thread"] >= 1
    scene.check()


async def test_a_plan_without_a_limit(signals: Signals) -> None:
    """A store counts what is used meanwhile, nothing is shown, and an outage stops no call."""
    daily = Quota(by_plan, per="global", window="1d")
    even = Quota(lambda *_: None, per="global", window="1d", smooth=True, name="even")
    limits: list[Limit] = [
        ToolCallLimit("search", thread_limit=by_plan),
        ToolCallLimit("calc", quotas=[daily, even]),
        TokenLimit(thread_limit=lambda state, runtime: None),
    ]
    store = FickleStore(MemoryStore())
    scene = Scene(signals, asking("search", "calc"), limits, store=store)
    ran = []
    for turn in ("free", "unlimited", "unlimited in an outage", "unlimited", "pro"):
        plan, *outage = turn.split(maxsplit=1)
        store.down = bool(outage)
        await scene.play(context={"plan": plan})
        shown = signals.samples("langchain_quota_thread_used")
        ran.append((len(scene.ran), *shown.values()))
    assert ran == [(2, 1), (4,), (6,), (8,), (8, 4)]
    assert counts(store)["search:thread:thread-1"] == scene.usage().tools["search"] == 4
    assert [each.used for each in store.usages("calc:global:*")] == [4]


@functions
@either
async def test_one_that_raises(form: Form, function: Any, kind: Kind, signals: Signals) -> None:
    """A function that raises fails the run, once counted; the next turn is charged to nobody."""
    limit = ToolCallLimit("search", thread_limit=function)
    scene = Scene(signals, [["search"], ["search"], "done"], [limit], kind=kind, form=form)
    with pytest.raises(PlanError, match="the plans are down"):
        await scene.play(context={"plan": "unknown"})
    assert signals.errors("dynamic_limit", "PlanError") == 1
    assert (scene.ran, len(scene.model.calls)) == ([], 1)
    await scene.play(context={"plan": "free"})
    assert scene.ran == ["search"]
    scene.check()


ACME = {"tenant": "acme", "user_id": "ann"}
TWICE = asking("search", "search")


class Tenants(MemoryStore):
    """A user's own store, whose keys begin with the tenant."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = lambda _, runtime: runtime.context["tenant"]


@both_forms
async def test_every_key_of_a_run_has_its_tenant(form: Form, signals: Signals) -> None:
    """Thread, run, root run, user, calls and tokens: every key begins with the tenant."""
    store = Tenants()
    limits: list[Limit] = [
        ToolCallLimit("search", thread_limit=9, run_limit=5, quotas=[Quota(9, per="root_run")]),
        ToolCallLimit("search", quotas=[Quota(2, per="user_id")], name="user"),
        ModelCallLimit(thread_limit=9),
        TokenLimit(thread_limit=1_000, run_limit=900),
    ]
    scene = Scene(signals, TWICE, limits, store=store, form=form)
    for tenant, ran in (("acme", 2), ("beta", 4), ("acme", 4)):
        await scene.play(context={"tenant": tenant, "user_id": "ann"})
        assert len(scene.ran) == ran
        keys = [use.key for use in store.usages() if use.key.startswith(f"{tenant}/")]
        assert len(keys) >= 6
    assert all(use.key.startswith(("acme/", "beta/")) for use in store.usages())


@pytest.mark.parametrize(
    ("tenant", "error"),
    [
        *(("", ValueError), ("a}b", ValueError), ("a{b", ValueError), ("a/b", ValueError)),
        *(("a b", ValueError), ("é", ValueError), ("x" * 65, ValueError)),
        *((7, TypeError), (None, TypeError)),
    ],
)
async def test_no_usable_prefix(tenant: object, error: type[Exception], signals: Signals) -> None:
    """Without a prefix that can be one, the run fails, says why, and charges nothing."""
    store, limit = Tenants(), ToolCallLimit("search", thread_limit=9)
    scene = Scene(signals, TWICE, [limit], store=store, context={"tenant": tenant})
    with pytest.raises(error, match="what the function for prefix of the store gives must"):
        await scene.play()
    assert store.usages() == []


@pytest.mark.parametrize(
    "limit",
    [
        ToolCallLimit("search", quotas=[Quota(9, per="global")]),
        ModelCallLimit(quotas=[Quota(9, per="agent")]),
        ConcurrencyLimit("search", max_concurrency=2),
    ],
)
def test_a_limit_over_all_tenants(limit: Any) -> None:
    """A limit that is wider than the prefix is refused with the remedy, when it is given."""
    store = RedisStore("redis://127.0.0.1:1", prefix=lambda *_: "acme")
    with pytest.raises(ValueError, match="whose store has a string as prefix"):
        QuotaMiddleware([limit], store=store)


async def test_a_thread_is_reset_and_granted_more_by_its_prefix(signals: Signals) -> None:
    """Where no run is, the caller names the prefix; without it, nothing is changed."""
    limit = ToolCallLimit("search", thread_limit=2)
    scene = await Scene(signals, TWICE, [limit], store=Tenants(), context=ACME).played()
    of: Any = {"thread": "thread-1"}
    quota = scene.quota
    unnamed = quota.agrant("tool:search", 1, **of), quota.aleft("tool:search", **of)
    for change in (quota.areset(scene.agent, CONFIG), *unnamed):
        with pytest.raises(TypeError, match=r"prefix.* must be a string, not None"):
            await change
    config: Any = {"configurable": {"thread_id": "thread-1", "quota_prefix": "acme"}}
    await quota.agrant("tool:search", 1, prefix="acme", **of)
    assert (await quota.aleft("tool:search", prefix="acme", **of)).left == 1
    await scene.play()
    assert len(scene.ran) == 2 + 1
    await quota.areset(scene.agent, config)
    await scene.play()
    assert len(scene.ran) == 2 + 1 + 2


def test_keys_and_lists_without_a_run() -> None:
    """A key without a prefix, and a list of all prefixes, are refused with the remedy."""
    store = RedisStore("redis://127.0.0.1:1", prefix=lambda *_: "acme")
    assert callable(store.prefix)
    assert store.prefix({}, SimpleNamespace(context={})) == "acme"
    key, remedy = "search:user_id:ada", "before the slash"
    calls: Any = partial(store.peek, [key]), partial(store.grant, key, 1), store.usages
    for call, said in zip(calls, (remedy, remedy, "prefix='acme'"), strict=True):
        with pytest.raises(ValueError, match=said):
            call()

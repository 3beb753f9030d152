"""Agents whose store has a function as prefix: each tenant's counts are apart, and in one place."""

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
from tests.scene import CONFIG, Form, Scene, asking, both_forms
from tests.telemetry import Signals

ACME = {"tenant": "acme", "user_id": "ann"}
TWICE = asking("search", "search")


class Tenants(MemoryStore):
    """A user's own store, whose keys begin with the tenant."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = lambda _, runtime: runtime.context["tenant"]


@both_forms
async def test_every_key_of_a_run_has_its_tenant(form: Form, signals: Signals) -> None:
    """Thread, run, root run, user, calls and tokens: every key begins with the tenant.

    So a user of two tenants has the whole of the limits in each of them.
    """
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

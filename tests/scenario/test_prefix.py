"""Agents whose store has a function as prefix: each tenant's counts are apart, and in one place."""

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

ACME, BETA = {"tenant": "acme", "user_id": "ann"}, {"tenant": "beta", "user_id": "ann"}
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
        ModelCallLimit(thread_limit=9, quotas=[Quota(9, per="user_id")]),
        TokenLimit(thread_limit=1_000, run_limit=900),
    ]
    scene = Scene(signals, TWICE, limits, store=store, form=form, context=ACME)
    await scene.play()
    assert scene.ran == ["search"] * 2
    keys = [use.key for use in store.usages()]
    assert len(keys) >= 6
    assert all(key.startswith("acme/") for key in keys)


async def test_tenants_share_no_count(signals: Signals) -> None:
    """A user of two tenants has the whole quota in each of them."""
    limit = ToolCallLimit("search", quotas=[Quota(2, per="user_id")])
    scene = Scene(signals, TWICE, [limit], store=Tenants())
    for context, ran in ((ACME, 2), (BETA, 4), (ACME, 4)):
        await scene.play(context=context)
        assert len(scene.ran) == ran


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
    scene = Scene(signals, TWICE, [limit], store=Tenants(), context=ACME)
    await scene.play()
    of: Any = {"thread": "thread-1"}
    for change in (
        scene.quota.areset(scene.agent, CONFIG),
        *(scene.quota.agrant("tool:search", 1, **of), scene.quota.aleft("tool:search", **of)),
    ):
        with pytest.raises(TypeError, match=r"prefix.* must be a string, not None"):
            await change
    config: Any = {"configurable": {"thread_id": "thread-1", "quota_prefix": "acme"}}
    await scene.quota.agrant("tool:search", 1, prefix="acme", **of)
    assert (await scene.quota.aleft("tool:search", prefix="acme", **of)).left == 1
    await scene.play()
    assert len(scene.ran) == 2 + 1
    await scene.quota.areset(scene.agent, config)
    await scene.play()
    assert len(scene.ran) == 2 + 1 + 2


def test_keys_and_lists_without_a_run() -> None:
    """A key without a prefix, and a list of all prefixes, are refused with the remedy."""
    store = RedisStore("redis://127.0.0.1:1", prefix=lambda *_: "acme")
    assert callable(store.prefix)
    assert store.prefix({}, SimpleNamespace(context={})) == "acme"
    with pytest.raises(ValueError, match="before the slash"):
        store.peek(["search:user_id:ada"])
    with pytest.raises(ValueError, match="before the slash"):
        store.grant("search:user_id:ada", 1)
    with pytest.raises(ValueError, match="prefix='acme'"):
        store.usages()
    with pytest.raises(TypeError, match="prefix must be a string or a function"):
        RedisStore("redis://127.0.0.1:1", prefix=7)  # type: ignore[arg-type]

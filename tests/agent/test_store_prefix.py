"""Agents whose store has a function as prefix: each tenant's counts are apart, and in one place."""

from types import SimpleNamespace
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    RedisStore,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form, both_forms
from tests.signals import Signals

ASKED: Any = {"messages": [("user", "hi")]}
ACME, BETA = {"tenant": "acme", "user_id": "ann"}, {"tenant": "beta", "user_id": "ann"}


class Tenants(MemoryStore):
    """A user's own store, whose keys begin with the tenant."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = lambda _, runtime: runtime.context["tenant"]


def search() -> str:
    """Search the web."""
    return "found"


async def run(form: Form, agent: Any, context: Any) -> list[str]:
    """Run an agent that searches twice; what it reads of its calls."""
    config: Any = {"configurable": {"thread_id": "7"}}
    if form == "sync":
        result = agent.invoke(ASKED, config, context=context)
    else:
        result = await agent.ainvoke(ASKED, config, context=context)
    messages = result["messages"]
    begin = max(index for index, each in enumerate(messages) if each.type == "human")
    return sorted(each.content[:5] for each in messages[begin:] if each.type == "tool")


def agent_of(signals: Signals, store: MemoryStore, *limits: Any) -> tuple[Any, Any]:
    """An agent that searches twice in each run; and its middleware."""
    quota: Any = QuotaMiddleware(limits, store=store, telemetry=signals.telemetry)
    model = ScriptedChatModel(
        script=lambda messages: ["search"] * 2 if messages[-1].type == "human" else "done"
    )
    made = create_agent(model, [search], middleware=[quota], checkpointer=InMemorySaver())
    return made, quota


@both_forms
async def test_every_key_of_a_run_has_its_tenant(form: Form, signals: Signals) -> None:
    """Thread, run, root run, user, calls and tokens: every key begins with the tenant."""
    store = Tenants()
    agent, _ = agent_of(
        signals,
        store,
        ToolCallLimit("search", thread_limit=9, run_limit=5, quotas=[Quota(9, per="root_run")]),
        ModelCallLimit(thread_limit=9, quotas=[Quota(9, per="user_id")]),
        TokenLimit(thread_limit=1_000, run_limit=900),
    )
    assert await run(form, agent, ACME) == ["found", "found"]
    keys = [use.key for use in store.usages()]
    assert len(keys) >= 6
    assert all(key.startswith("acme/") for key in keys)


@both_forms
async def test_tenants_share_no_count(form: Form, signals: Signals) -> None:
    """A user of two tenants has the whole quota in each of them."""
    limit = ToolCallLimit("search", quotas=[Quota(2, per="user_id")])
    agent, _ = agent_of(signals, Tenants(), limit)
    assert await run(form, agent, ACME) == ["found", "found"]
    assert await run(form, agent, BETA) == ["found", "found"]
    assert "found" not in await run(form, agent, ACME)


@both_forms
@pytest.mark.parametrize(
    ("tenant", "error"),
    [
        *(("", ValueError), ("a}b", ValueError), ("a{b", ValueError), ("a/b", ValueError)),
        *(("a b", ValueError), ("é", ValueError), ("x" * 65, ValueError)),
        *((7, TypeError), (None, TypeError)),
    ],
)
async def test_no_usable_prefix(
    form: Form, signals: Signals, tenant: object, error: type[Exception]
) -> None:
    """Without a prefix that can be one, the run fails, says why, and charges nothing."""
    store = Tenants()
    agent, _ = agent_of(signals, store, ToolCallLimit("search", thread_limit=9))
    with pytest.raises(error, match="what the function for prefix of the store gives must"):
        await run(form, agent, {"tenant": tenant})
    assert store.usages() == []


@both_forms
async def test_a_function_that_fails(form: Form, signals: Signals) -> None:
    """What the function raises says that it is the store's prefix."""
    agent, _ = agent_of(signals, Tenants(), ToolCallLimit("search", thread_limit=9))
    with pytest.raises(KeyError) as caught:
        await run(form, agent, {"user_id": "ann"})
    assert "raised by the function for prefix of the store" in caught.value.__notes__


@pytest.mark.parametrize(
    "limit",
    [
        ToolCallLimit("search", quotas=[Quota(9, per="global")]),
        ModelCallLimit(quotas=[Quota(9, per="agent")]),
        ToolCallLimit("search", at_once=2),
    ],
)
def test_a_limit_over_all_tenants(limit: Any) -> None:
    """A limit that is wider than the prefix is refused with the remedy, when it is given."""
    store = RedisStore(
        "redis://127.0.0.1:1", prefix=lambda _, runtime: str(runtime.context["tenant"])
    )
    with pytest.raises(ValueError, match="whose store has a string as prefix"):
        QuotaMiddleware([limit], store=store)


async def test_a_thread_is_reset_and_granted_more_by_its_prefix(signals: Signals) -> None:
    """Where no run is, the config names the prefix; without it, nothing is changed."""
    agent, quota = agent_of(signals, Tenants(), ToolCallLimit("search", thread_limit=2))
    assert await run("async", agent, ACME) == ["found", "found"]
    config: Any = {"configurable": {"thread_id": "7"}}
    for change in (quota.areset(agent, config), quota.agrant(config, 1)):
        with pytest.raises(TypeError, match="quota_prefix"):
            await change
    config["configurable"]["quota_prefix"] = "acme"
    await quota.agrant(config, 1)
    assert (await run("async", agent, ACME)).count("found") == 1
    await quota.areset(agent, config)
    assert await run("async", agent, ACME) == ["found", "found"]


def test_keys_and_lists_without_a_run() -> None:
    """A key without a prefix, and a list of all prefixes, are refused with the remedy."""
    store = RedisStore("redis://127.0.0.1:1", prefix=lambda *_: "acme")
    runtime = SimpleNamespace(context={})
    assert callable(store.prefix)
    assert store.prefix({}, runtime) == "acme"
    with pytest.raises(ValueError, match="before the slash"):
        store.peek(["search:user_id:ada"])
    with pytest.raises(ValueError, match="before the slash"):
        store.grant("search:user_id:ada", 1)
    with pytest.raises(ValueError, match="prefix='acme'"):
        store.usages()
    with pytest.raises(TypeError, match="prefix must be a string or a function"):
        RedisStore("redis://127.0.0.1:1", prefix=7)  # type: ignore[arg-type]

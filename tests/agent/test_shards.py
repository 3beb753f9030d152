"""Agents whose store has shards: which shard a call is counted in, and who must name it."""

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.tools import ToolRuntime
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.agent.conftest import Form, both_forms
from tests.conftest import Signals

ASKED: Any = {"messages": [("user", "hi")]}
ACME, BETA = {"tenant": "acme", "user_id": "ann"}, {"tenant": "beta", "user_id": "ann"}


class Sharded(MemoryStore):
    """A user's own store, with shards."""

    def __init__(self, shard_by: str) -> None:
        super().__init__()
        self.shard_by = shard_by
        self.within_shard = ("user_id",)

    def used(self) -> dict[str, int]:
        """What is counted, by key; keys of runs are without the random id of the run."""
        found: dict[str, int] = {}
        for use in self.usages():
            key = use.key
            if ":run:" in key or ":root_run:" in key:
                key = key[: key.index("run:") + 4]
            found[key] = use.used if key not in found else max(found[key], use.used)
        return found


def search() -> str:
    """Search the web."""
    return "found"


async def run(
    form: Form, agent: Any, context: Any, thread: str | None = "7", **configurable: Any
) -> list[str]:
    """Run an agent; what the model reads of its tool calls, sorted."""
    named = {} if thread is None else {"thread_id": thread}
    config = {"configurable": named | configurable}
    if form == "sync":
        result = agent.invoke(ASKED, config, context=context)
    else:
        result = await agent.ainvoke(ASKED, config, context=context)
    return sorted(each.content[:9] for each in result["messages"] if each.type == "tool")


def agent_of(signals: Signals, store: MemoryStore, *limits: Limit) -> tuple[Any, Any]:
    """An agent that searches twice in each run; and its middleware."""
    quota: Any = QuotaMiddleware(limits, store=store, telemetry=signals.telemetry)
    model = ScriptedChatModel(
        script=lambda messages: ["search"] * 2 if messages[-1].type == "human" else "done"
    )
    made = create_agent(model, [search], middleware=[quota], checkpointer=InMemorySaver())
    return made, quota


@both_forms
async def test_all_counts_of_a_run_are_in_its_tenants_shard(form: Form, signals: Signals) -> None:
    """Thread, run, root run, tenant and user: the key of each count names the tenant."""
    store = Sharded("tenant")
    limits: list[Limit] = [
        ToolCallLimit(
            "search",
            thread_limit=9,
            run_limit=5,
            quotas=[Quota(9, per=each) for each in ("root_run", "tenant", "user_id")],
        ),
        ModelCallLimit(thread_limit=9),
        TokenLimit(thread_limit=1_000, run_limit=900),
    ]
    agent, _ = agent_of(signals, store, *limits)
    await run(form, agent, ACME)
    found = store.used()
    tokens = found.pop("acme/model.total_tokens:thread:7")
    assert tokens > 0
    # The number of the thread's newest root run begins with the time.
    assert found.pop("acme/:root_run:") > 1_000_000
    assert found == {
        "acme/model:thread:7": 2,
        "acme/search:run:": 2,
        "acme/model.total_tokens:run:": tokens,
        "acme/search:root_run:": 2,
        "acme/search:tenant:acme": 2,
        "acme/search:thread:7": 2,
        "acme/search:user_id:ann": 2,
    }


async def test_tenants_are_counted_apart(signals: Signals) -> None:
    """A tenant's calls are not charged to another tenant; a user's neither."""
    store = Sharded("tenant")
    agent, _ = agent_of(signals, store, ToolCallLimit("search", quotas=[Quota(3, per="user_id")]))
    said = [await run("async", agent, who, str(n)) for n, who in enumerate([ACME, BETA, ACME])]
    assert said == [["found"] * 2, ["found"] * 2, ["Tool call", "found"]]


@both_forms
@pytest.mark.parametrize(
    ("shard_by", "context", "thread", "problem"),
    [
        ("tenant", {"user_id": "ann"}, "7", "shard_by='tenant' needs 'tenant' in runtime.context"),
        ("tenant", None, "7", "shard_by='tenant' needs 'tenant' in runtime.context"),
        ("tenant", {"tenant": ""}, "7", "shard_by='tenant' must not be empty"),
        ("tenant", {"tenant": 1.5}, "7", "must be a string, a whole number or a UUID"),
        ("thread", ACME, None, "shard_by='thread' is per thread, and this run has none"),
    ],
)
async def test_a_run_without_its_shard(
    form: Form,
    shard_by: str,
    context: Any,
    thread: str | None,
    problem: str,
    *,
    signals: Signals,
) -> None:
    """It fails before anything is charged, and says what is missing."""
    store = Sharded(shard_by)
    _, quota = agent_of(signals, store, ToolCallLimit("search", run_limit=5))
    model = ScriptedChatModel(script=[["search"], "done"])
    agent = create_agent(model, [search], middleware=[quota])
    with pytest.raises((TypeError, ValueError), match=problem):
        await run(form, agent, context, thread)
    assert store.usages() == []


async def test_a_sub_agent_is_counted_with_its_root_run(signals: Signals) -> None:
    """The sub-agent gets the tenant, too, and is charged to the root run's quota."""
    store = Sharded("tenant")
    limit = ToolCallLimit(quotas=[Quota(3, per="root_run")])
    child, quota = agent_of(signals, store, limit)

    async def ask(runtime: ToolRuntime[Any, Any]) -> str:
        """Ask another agent."""
        found = await child.ainvoke(ASKED, context=runtime.context)
        return f"{[each.content for each in found['messages']].count('found')} found"

    model = ScriptedChatModel(script=[["ask"], ["ask"], "done"])
    parent = create_agent(model, [ask], middleware=[quota])
    # The first child searches twice; then nothing is left.
    assert await run("async", parent, ACME) == ["2 found", "Tool call"]
    assert store.used()["acme/__all__:root_run:"] == 3


async def test_by_thread(signals: Signals) -> None:
    """Each thread is a shard, and the context needs no name for it."""
    store = Sharded("thread")
    agent, quota = agent_of(signals, store, ToolCallLimit("search", thread_limit=3, run_limit=2))
    await run("async", agent, None)
    assert store.used() == {"7/search:thread:7": 2, "7/search:run:": 2}
    await quota.areset(agent, {"configurable": {"thread_id": "7"}})
    assert store.used()["7/search:thread:7"] == 0


@both_forms
async def test_a_thread_is_reset_in_its_shard(form: Form, signals: Signals) -> None:
    """The config names the tenant, too. Without it nothing is reset, and the error says why.

    A tenant's thread that has the same id keeps its count.
    """
    store = Sharded("tenant")
    agent, quota = agent_of(signals, store, ToolCallLimit("search", thread_limit=2))
    other, _ = agent_of(signals, store, ToolCallLimit("search", thread_limit=2))
    await run(form, agent, ACME)
    await run(form, other, BETA)

    async def reset(**named: str) -> None:
        config = {"configurable": {"thread_id": "7", **named}}
        if form == "sync":
            quota.reset(agent, config)
        else:
            await quota.areset(agent, config)

    with pytest.raises(ValueError, match="shard_by='tenant': add 'tenant' to"):
        await reset()
    assert store.used() == {"acme/search:thread:7": 2, "beta/search:thread:7": 2}
    await reset(tenant="acme")
    assert store.used() == {"acme/search:thread:7": 0, "beta/search:thread:7": 2}
    assert await run(form, agent, ACME) == ["found"] * 4


async def test_a_thread_is_granted_more_in_its_shard(signals: Signals) -> None:
    """A grant to a thread, or under a key with its shard, raises the limits there."""
    store = Sharded("tenant")
    agent, quota = agent_of(signals, store, ToolCallLimit("search", thread_limit=1))
    config: Any = {"configurable": {"thread_id": "7"}}
    with pytest.raises(ValueError, match="shard_by='tenant': add 'tenant' to"):
        quota.grant(agent, config, 1)
    config["configurable"]["tenant"] = "acme"
    assert quota.grant(agent, config, 1).key == "acme/search:thread:7"
    assert await run("async", agent, ACME) == ["found"] * 2
    store.grant("acme/search:thread:7", 1)
    assert await run("async", agent, ACME) == ["Tool call", *["found"] * 3]


async def test_what_crosses_shards_has_a_store_of_its_own(signals: Signals) -> None:
    """The way out of the error: a second middleware counts all tenants, its model calls too."""
    store, everybody = Sharded("tenant"), MemoryStore()
    crossing = Quota(3, per="global")
    limits: list[list[Limit]] = [
        [ToolCallLimit("search", quotas=[Quota(2, per="tenant")])],
        [ToolCallLimit("search", quotas=[crossing]), ModelCallLimit(quotas=[crossing])],
    ]
    with pytest.raises(ValueError, match="counts calls of several shards"):
        agent_of(signals, store, *limits[1])

    class OfEverybody(QuotaMiddleware[Any, Any]):
        """Has another name, so that an agent takes both."""

    middleware: Any = [
        QuotaMiddleware(limits[0], store=store, telemetry=signals.telemetry),
        OfEverybody(limits[1], store=everybody, telemetry=signals.telemetry),
    ]
    said = []
    for who in (ACME, BETA):
        model = ScriptedChatModel(script=[["search"] * 2, "done"])
        agent = create_agent(model, [search], middleware=middleware)
        said.append(await run("async", agent, who))
    assert said == [["found"] * 2, ["Tool call", "found"]]
    assert [each.used for each in everybody.usages()] == [3, 3]

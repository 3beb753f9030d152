"""More than limits say: what is granted to a thread or a user is judged, shown and counted."""

from collections.abc import Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.messages.ai import UsageMetadata
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import (
    CostLimit,
    Decision,
    InlineQuotaMiddleware,
    LimitStatus,
    MemoryStore,
    ModelCallLimit,
    ModelUsage,
    Outcome,
    Quota,
    QuotaMiddleware,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.agent.conftest import Form, both_forms
from tests.agent.graphs import GraphScene
from tests.signals import Signals, needs_inline

SEARCH = ToolCallLimit("search", thread_limit=1)
CONFIG: Any = {"configurable": {"thread_id": "7"}}
DAY = timedelta(days=1)


def search() -> str:
    """Search the web."""
    return "found"


class Scene:
    """An agent with one middleware, and what was decided about its calls."""

    def __init__(
        self,
        signals: Signals,
        *limits: Any,
        script: Sequence[Any] = (["search", "search"], "done") * 9,
        middleware: type[QuotaMiddleware[Any, Any]] = QuotaMiddleware,
        **options: Any,
    ) -> None:
        self.decisions: list[Decision] = []
        options = {"telemetry": signals.telemetry, "store": MemoryStore(), **options}
        self.quota = middleware([*limits], on_decision=self.decisions.append, **options)
        self.agent: Any = create_agent(
            ScriptedChatModel(script=script),
            [search],
            middleware=[self.quota],
            checkpointer=InMemorySaver(),
            name="boss",
            context_schema=dict,
        )

    async def run(self, user: str = "ada", form: Form = "async") -> list[str]:
        """Run once on the thread; what was decided about tool calls, in this run."""
        self.decisions.clear()
        messages = {"messages": [("user", "Go on.")]}
        if form == "sync":
            self.agent.invoke(messages, CONFIG, context={"user_id": user})
        else:
            await self.agent.ainvoke(messages, CONFIG, context={"user_id": user})
        return [str(each.outcome) for each in self.decisions if each.call.kind == "tool"]

    async def grant(self, form: Form, amount: Any, **options: Any) -> Any:
        """Grant the thread more."""
        if form == "sync":
            return self.quota.grant(CONFIG, amount, **options)
        return await self.quota.agrant(CONFIG, amount, **options)


@both_forms
async def test_a_thread_is_granted_more(signals: Signals, form: Form) -> None:
    """So many calls more run, once for an id; decisions, gauges and messages have the new limit."""
    scene = Scene(signals, SEARCH)
    assert await scene.run() == ["allowed", "blocked"]
    first = await scene.grant(form, 2, reason="ticket 4711", by="bo", id="4711")
    assert (first.amount, first.reason, first.by) == (2, "ticket 4711", "bo")
    again = await scene.grant(form, 9, id="4711")
    assert (again.amount, again.reason, again.by) == (2, "ticket 4711", "bo")
    assert await scene.run() == ["allowed", "allowed"]
    assert [each.limits[0].thread_limit for each in scene.decisions if each.limits] == [3, 3]
    assert await scene.run() == ["blocked", "blocked"]
    labels = {"agent": "boss", "limit": "tool:search"}
    assert signals.value("langchain_quota_thread_limit", **labels, thread_id="7") == 3
    assert signals.value("langchain_quota_granted_total", **labels, scope="thread") == 2
    assert signals.value("langchain_quota_limit", **labels, scope="thread") == 1


async def test_a_grant_raises_every_limit_over_its_count(signals: Signals) -> None:
    """Two limits over one count are raised by one grant, and each counts it for itself."""
    trial = ToolCallLimit("search", name="trial", thread_limit=1, enforce=False)
    scene = Scene(signals, SEARCH, trial, ModelCallLimit(thread_limit=9))
    await scene.grant("async", 2, limit="trial")
    assert await scene.run() == ["allowed", "allowed"]
    for limit in ("tool:search", "trial"):
        labels = {"agent": "boss", "limit": limit}
        assert signals.value("langchain_quota_thread_limit", **labels, thread_id="7") == 3
        assert signals.value("langchain_quota_granted_total", **labels, scope="thread") == 2
    model = {"agent": "boss", "limit": "model"}
    assert signals.value("langchain_quota_thread_limit", **model, thread_id="7") == 9


async def test_a_reset_leaves_what_is_granted(signals: Signals) -> None:
    """A thread that is set back has its limit and the grant again."""
    scene = Scene(signals, SEARCH)
    await scene.run()
    await scene.grant("async", 1)
    assert await scene.run() == ["allowed", "blocked"]
    scene.quota.reset(scene.agent, CONFIG)
    assert await scene.run() == ["allowed", "allowed"]


@needs_inline
async def test_inline(signals: Signals) -> None:
    """The inline middleware judges by what is granted, too."""
    scene = Scene(signals, SEARCH, middleware=InlineQuotaMiddleware)
    assert await scene.run() == ["allowed", "blocked"]
    await scene.grant("async", 1)
    assert await scene.run() == ["allowed", "blocked"]


async def test_a_user_is_granted_more(signals: Signals) -> None:
    """Of a user's day: this user's calls run, with the raised limit in all that is shown."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[Quota(1, per="user_id", window=DAY)])
    scene = Scene(signals, limit, store=store)
    assert await scene.run() == ["allowed", "blocked"]
    store.grant("search:user_id:ada", 1, window=DAY)
    assert await scene.run() == ["allowed", "blocked"]
    [refused] = [each for each in scene.decisions if each.outcome is Outcome.BLOCKED]
    [quota] = refused.limits[0].quotas
    assert (quota.used, quota.limit) == (2, 2)
    assert await scene.run("bob") == ["allowed", "blocked"]
    labels = {"agent": "boss", "limit": "tool:search", "scope": "user_id"}
    assert signals.value("langchain_quota_granted_total", **labels) == 1
    assert signals.value("langchain_quota_limit", **labels) == 1


@both_forms
async def test_the_model_is_told_of_what_is_granted(signals: Signals, form: Form) -> None:
    """What is left is said with the grant, and what is exhausted no more may be called."""
    model = ScriptedChatModel(script=[["search"], "done", "done"])
    limit = ToolCallLimit("search", thread_limit=1, near=0.5)
    scene = Scene(signals, limit, store=MemoryStore(), tell_model=True, hide_exhausted=True)
    scene.agent = create_agent(
        model, [search], middleware=[scene.quota], checkpointer=InMemorySaver(), name="boss"
    )
    await scene.run(form=form)
    told = str(model.calls[-1].messages[-1].content)
    assert "0 of 1 left" in told
    assert "No tool may be called now" in told
    await scene.grant(form, 1)
    await scene.run(form=form)
    told = str(model.calls[-1].messages[-1].content)
    assert "1 of 2 left" in told
    assert "No tool may be called now" not in told


def dollars(usage: ModelUsage) -> Decimal:
    return Decimal(usage.total_tokens)


def answer(tokens: int) -> AIMessage:
    used = UsageMetadata(input_tokens=tokens - 1, output_tokens=1, total_tokens=tokens)
    return AIMessage("done", usage_metadata=used)


async def test_a_budget_is_granted_more(signals: Signals) -> None:
    """Dollars are granted as they are written; the gauges have them when the call is charged."""
    limit = CostLimit(thread_limit="2", exit_behavior="end")
    scene = Scene(
        signals,
        limit,
        script=[answer(2) for _ in range(9)],
        prices=dollars,
    )
    await scene.run()
    await scene.run()
    assert [str(each.outcome) for each in scene.decisions] == ["blocked"]
    grant = await scene.grant("async", "2.50")
    assert (grant.amount, grant.unit) == (2_500_000, "microdollars")
    await scene.run()
    assert [str(each.outcome) for each in scene.decisions] == ["allowed"]
    labels = {"agent": "boss", "limit": limit.name}
    assert signals.value("langchain_quota_thread_limit_dollars", **labels, thread_id="7") == 4.5
    assert signals.value("langchain_quota_thread_used_dollars", **labels, thread_id="7") == 4
    assert signals.value("langchain_quota_granted_dollars_total", **labels, scope="thread") == 2.5


async def test_the_last_call_is_the_last_with_the_grant(signals: Signals) -> None:
    """Which call finalizes a run is judged by the raised limit."""
    limit = ModelCallLimit(thread_limit=1, exit_behavior="finalize")
    scene = Scene(signals, limit, script=["one", "two", "three"])
    await scene.run()
    await scene.grant("async", 2)
    await scene.run()
    state = scene.agent.get_state(CONFIG).values["langchain_quota"]
    assert not state["final"]
    await scene.run()
    assert scene.agent.get_state(CONFIG).values["langchain_quota"]["final"]


@both_forms
async def test_a_grant_before_a_charge_beside_calls(signals: Signals, form: Form) -> None:
    """A grant is counted, also if the next thing that the store hears is a charge of a tool."""
    store = MemoryStore()
    beside = ScriptedChatModel(script=[answer(5), answer(5)])

    def look() -> str:
        """Look it up."""
        store.grant("model.total_tokens:thread:7", 50)
        beside.invoke("Where?")
        return "found"

    limit = TokenLimit(thread_limit=100, name="tokens", exit_behavior="end")
    scene = Scene(signals, limit, store=store, charge_all_models=True)
    scene.agent = create_agent(
        ScriptedChatModel(script=[["look"], answer(2)]),
        [look],
        middleware=[scene.quota],
        checkpointer=InMemorySaver(),
        name="boss",
    )
    await scene.run(form=form)
    labels = {"agent": "boss", "limit": "tokens", "scope": "thread"}
    assert signals.value("langchain_quota_granted_tokens_total", **labels) == 50
    [use] = store.usages()
    assert use.granted == 50


def numbers(status: LimitStatus) -> list[int | None]:
    """The limits of a thread or of quotas, as they are shown."""
    return [each.limit for each in status.quotas] or [status.thread_limit]


GRAPHS: dict[str, tuple[Limit, str, Any, int]] = {
    "a thread": (SEARCH, "search:thread:thread-1", [["search", "search"], "done"], 2),
    "all": (
        ToolCallLimit("search", quotas=[Quota(1, per="global")]),
        "search:global:",
        [["search", "search"], "done"],
        2,
    ),
    "a budget": (
        TokenLimit(thread_limit=2, exit_behavior="end"),
        "model.total_tokens:thread:thread-1",
        [answer(2)],
        3,
    ),
}


@both_forms
@pytest.mark.parametrize("what", GRAPHS)
async def test_a_graph_is_granted_more(signals: Signals, form: Form, what: str) -> None:
    """A GraphQuota judges by what its store has granted: a thread, a quota, a budget."""
    limit, key, script, amount = GRAPHS[what]
    store, decisions = MemoryStore(), list[Decision]()
    scene = GraphScene(
        signals, script * 9, [limit], form=form, store=store, on_decision=decisions.append
    )
    await scene.turn()
    decisions.clear()
    await scene.turn()
    assert Outcome.ALLOWED not in {each.outcome for each in decisions if each.limits}
    store.grant(key, amount)
    decisions.clear()
    await scene.turn()
    judged = [each for each in decisions if each.limits]
    assert {each.outcome for each in judged} == {Outcome.ALLOWED}
    first = 2 if what == "a budget" else 1
    raised = {number for each in judged for number in numbers(each.limits[0])}
    assert raised == {first + amount}
    [use] = store.usages(key)
    assert (use.granted, use.limit) == (amount, first)


@both_forms
async def test_a_thread_is_granted_more_before_it_runs_and_while_it_waits(
    signals: Signals, form: Form
) -> None:
    """A store needs no run to grant more, and no run to be at rest."""
    scene = Scene(signals, SEARCH, script=[["search", "search"], ["search"], "done"])
    await scene.grant(form, 1)
    scene.agent.interrupt_before_nodes = ["tools"]
    assert await scene.run(form=form) == ["allowed", "allowed"]
    await scene.grant(form, 1)
    scene.agent.interrupt_before_nodes = []
    await scene.agent.ainvoke(None, CONFIG, context={"user_id": "ada"})
    assert [each.outcome for each in scene.decisions if each.limits] == [Outcome.ALLOWED] * 3


class TestErrors:
    """What cannot be granted is refused, and named."""

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"limit": "model"}, "limit must name one with a thread_limit, not 'model'"),
            ({"limit": "search too"}, "not 'search too': 'tool:search', 'again'"),
            ({}, "limit must name one with a thread_limit, not None"),
        ],
    )
    async def test_limits(self, signals: Signals, options: Any, message: str) -> None:
        """The limit is one with a thread limit, and named where there are several."""
        again = ToolCallLimit("publish", name="again", thread_limit=5)
        scene = Scene(signals, SEARCH, again, ModelCallLimit(run_limit=9))
        with pytest.raises(ValueError, match=message):
            await scene.grant("async", 1, **options)

    async def test_no_thread(self, signals: Signals) -> None:
        """Without a thread, the error says how to name one."""
        scene = Scene(signals, SEARCH)
        with pytest.raises(ValueError, match="config names no thread"):
            scene.quota.grant({}, 1)

    @both_forms
    async def test_no_store(self, signals: Signals, form: Form) -> None:
        """Only a store gives grants; without one, the error says how to have one."""
        scene = Scene(signals, SEARCH, store=None)
        await scene.run()
        with pytest.raises(TypeError, match=r"needs a store that gives grants, not None: pass sto"):
            await scene.grant(form, 1)

    async def test_a_store_that_gives_none(self, signals: Signals) -> None:
        """A user's own store need not give grants; the error of a grant says so."""
        store = MemoryStore()

        class Own:
            """Keeps counts alone."""

            acquire, aacquire = store.acquire, store.aacquire
            peek, apeek, reset, areset = store.peek, store.apeek, store.reset, store.areset

        scene = Scene(signals, SEARCH, store=Own())
        with pytest.raises(TypeError, match="needs a store that gives grants, not <"):
            await scene.grant("async", 1)

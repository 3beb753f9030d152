"""What is left of limits, granted, revoked and reset by names: of limits, quotas and subjects."""

import json
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.tools import tool
from langgraph.types import interrupt

from langchain_quota import (
    CostLimit,
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    TimeLimit,
    TokenLimit,
    ToolCallLimit,
    usage,
)
from langchain_quota.limits import Limit
from tests.scene import ANN, CONFIG, Form, Kind, Scene, asking, both_forms, either, recording
from tests.stores import Clock
from tests.telemetry import HAS_INLINE, Signals

OCTOBER = datetime(2026, 10, 1, tzinfo=UTC).timestamp()
CALLS = asking("search", "search")
ADA = {"tenant": "acme", "user_id": "ada"}


def number(*_: object) -> int:
    return 5


async def left(scene: Scene, name: str, **of: Any) -> tuple[Any, ...]:
    balance = await scene.call("left", name, **of)
    return balance.used, balance.limit, balance.unit


@both_forms
@pytest.mark.parametrize("kind", ["quota", "graph", *(["inline"] if HAS_INLINE else [])])
async def test_every_count_of_a_limit(signals: Signals, form: Form, kind: Kind) -> None:
    """Each quota of each kind of limit, its grants and its reset are found by their names."""
    store = MemoryStore(clock=Clock(OCTOBER + 30))
    quotas = [
        Quota(9, per="tenant", window="month", tz="Europe/Berlin"),
        Quota(7, per="user_id", name="all"),
        Quota(8, per="user_id", window="1m", name="now"),
        *(Quota(20, per="global"), Quota(6, per="agent"), Quota(5, per="root_run")),
        Quota(number, per=lambda *_: 7, name="seven"),
        Quota(10, per="global", window="1m", smooth=True, burst=3, name="even"),
    ]
    limits: list[Limit] = [
        ToolCallLimit("search", name="mine", quotas=quotas),
        ToolCallLimit("search", name="other", thread_limit=4),
        CostLimit(quotas=[Quota("2.50", per="tenant")]),
        TimeLimit(quotas=[Quota("1m", per="tenant")]),
    ]
    options: Any = {"prices": lambda _: Decimal("0.75"), "name": "boss", "kind": kind}
    scene = Scene(signals, CALLS, limits, store=store, context=ADA, form=form, **options)
    await scene.play()
    for names, counts in (
        ({"tenant": "acme"}, (2, 9)),
        ({"tenant": "unheard"}, (0, 9)),
        ({"user_id": "ada", "quota": "now"}, (2, 8)),
        ({"user_id": "ada", "quota": "all"}, (2, 7)),
        ({"quota": "global"}, (2, 20)),
        ({"agent": "boss"}, (2, 6)),
        ({"root_run": "thread-1"}, (2, 5)),
        ({"seven": 7, "limit": 6}, (2, 6)),
        ({"quota": "even"}, (2, 3)),
    ):
        assert await left(scene, "mine", **names) == (*counts, "calls"), names
    assert await left(scene, "other", thread="thread-1") == (2, 4, "calls")
    assert await left(scene, "cost", tenant="acme") == (Decimal("1.50"), Decimal("2.50"), "dollars")
    assert (await left(scene, "time", tenant="acme"))[1:] == (60, "seconds")
    monthly = await scene.call("left", "mine", tenant="acme")
    assert monthly.resets_at == datetime(2026, 10, 31, 23, tzinfo=UTC)
    assert monthly.resets_at.utcoffset().total_seconds() == 3600
    for subject in ("acme", "unheard"):
        grant = await scene.call("grant", "cost", "0.25", tenant=subject, by="bo", reason="4711")
        assert (grant.by, grant.reason) == ("bo", "4711")
        assert (await left(scene, "cost", tenant=subject))[1] == Decimal("2.75")
        assert await scene.call("revoke", "cost", grant.id, tenant=subject) is not None
        assert (await left(scene, "cost", tenant=subject))[1] == Decimal("2.50")
    for names in ({"tenant": "acme"}, {"user_id": "ada", "quota": "now"}, {"quota": "even"}):
        await scene.call("reset", "mine", **names)
        assert (await left(scene, "mine", **names))[0] == 0
    assert await left(scene, "mine", user_id="ada", quota="all") == (2, 7, "calls")
    if kind == "graph":
        await scene.call("reset", "other", thread="thread-1")
        assert await left(scene, "other", thread="thread-1") == (0, 4, "calls")
    else:
        with pytest.raises(ValueError, match=r"state has the count .* call reset\(agent, config\)"):
            await scene.call("reset", "other", thread="thread-1")


def named() -> QuotaMiddleware[Any, Any]:
    days: Any = [Quota(1, per="user_id", name=name) for name in ("day", "now")]
    smooth = Quota(number, per="tenant", window="1m", smooth=True)
    limits: list[Limit] = [
        ToolCallLimit("a", name="mine", quotas=days),
        CostLimit(thread_limit=1, quotas=[Quota(number, per="tenant")]),
        ToolCallLimit("a", name="run", run_limit=1),
        ToolCallLimit("b", name="even", quotas=[smooth]),
    ]
    return QuotaMiddleware(limits, store=MemoryStore(), prices=lambda _: Decimal(1))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("nope", "no limit has the name 'nope': choose one of 'mine', 'cost', 'run', 'even'$"),
        ("mine", "needs quota='day', user_id=… or quota='now', user_id=…; given: no subject"),
        ("mine user_id", "needs quota='day', user_id=… or .*; given: user_id='x'"),
        ("mine user_id quota", "needs quota='day', .*; given: user_id='x', quota='x'"),
        ("cost user_id", "'cost' needs tenant=… or thread=…; given: user_id='x'"),
        ("cost tenant thread", "'cost' needs tenant=… or thread=…; given: tenant='x', thread='x'"),
        ("cost tenant", "a function decides the number of limit 'cost': give it, limit=…"),
        ("run thread", "'run' has no quota and no thread_limit to choose"),
        ("even tenant", "a function decides the number of limit 'even': give it, limit=…"),
    ],
)
def test_what_names_cannot_say(names: str, message: str) -> None:
    """An unknown name lists the names, and what is missing or too much is said."""
    name, *subjects = names.split()
    with pytest.raises(ValueError, match=message):
        named().left(name, **dict.fromkeys(subjects, "x"))


def test_what_is_no_name() -> None:
    """A subject of a wrong type, half an agent, and what a function decides are refused."""
    quota, wrong = named(), list[Any]([True, 1.5, None])
    for each in wrong:
        with pytest.raises(TypeError, match="subject of limit 'cost' must be a string, a whole"):
            quota.left("cost", limit=5, tenant=each)
    called: Any = (({}, CONFIG, {}), ("cost", CONFIG, {}), ("cost", CONFIG, {"tenant": "x"}))
    for *arguments, names in called:
        with pytest.raises(TypeError, match=r"reset takes an agent|what create_agent made"):
            quota.reset(*arguments, **names)
    with pytest.raises(ValueError, match="'even': use the store's own methods"):
        quota.reset("even", tenant="x")
    with pytest.raises(ValueError, match="'even': use the store's own methods"):
        quota.grant("even", 1, tenant="x")


def test_a_thread_that_the_state_counts(signals: Signals) -> None:
    """Without a store, the error says how the thread's count is read."""
    scene = Scene(signals, CALLS, [ToolCallLimit("search", thread_limit=4)])
    with pytest.raises(
        ValueError, match=r"call usage\(agent.get_state\(config\)\), or give a store"
    ):
        scene.quota.left("tool:search", thread="thread-1")


SEARCH = ToolCallLimit("search", thread_limit=1)


def scene_of(signals: Signals, *limits: Any, **options: Any) -> Scene:
    """An agent that searches twice in each run."""
    options = {"store": MemoryStore(), "name": "boss", "context": ANN, **options}
    return Scene(signals, asking("search", "search"), limits, **options)


async def outcomes(scene: Scene) -> list[str]:
    """What a new run decides about tool calls."""
    await scene.play()
    return [str(each.outcome) for each in scene.decisions if each.call.kind == "tool"]


def value(scene: Scene, name: str, limit: str = "tool:search", **labels: str) -> float | None:
    return scene.signals.value(f"langchain_quota_{name}", agent="boss", limit=limit, **labels)


@both_forms
async def test_a_thread_is_granted_more(signals: Signals, form: Form) -> None:
    """So many calls more run, once for an id; decisions, gauges and messages have the new limit."""
    scene = scene_of(signals, SEARCH, form=form)
    assert await outcomes(scene) == ["allowed", "blocked"]
    given: Any = {"thread": "thread-1", "reason": "ticket 4711", "by": "bo", "id": "4711"}
    for amount in (2, 9):
        grant = await scene.call("grant", "tool:search", amount, **given)
        assert (grant.amount, grant.reason, grant.by) == (2, "ticket 4711", "bo")
    assert await outcomes(scene) == ["allowed", "allowed"]
    assert [each.limits[0].counts[0].limit for each in scene.decisions if each.limits] == [3, 3]
    assert await outcomes(scene) == ["blocked", "blocked"]
    assert value(scene, "thread_limit", thread_id="thread-1") == 3
    assert value(scene, "granted_total", scope="thread", unit="calls") == 2
    assert value(scene, "limit", scope="thread", unit="calls") == 1
    await scene.reset()
    assert await outcomes(scene) == ["allowed", "allowed"]


async def test_a_grant_raises_every_limit_over_its_count(signals: Signals) -> None:
    """Two limits over one count are raised by one grant, and each counts it for itself."""
    trial = ToolCallLimit("search", name="trial", thread_limit=1, enforce=False)
    scene = scene_of(signals, SEARCH, trial, ModelCallLimit(thread_limit=9))
    scene.quota.grant("trial", 2, thread="thread-1")
    assert await outcomes(scene) == ["allowed", "allowed"]
    for limit in ("tool:search", "trial"):
        assert value(scene, "thread_limit", limit, thread_id="thread-1") == 3
        assert value(scene, "granted_total", limit, scope="thread", unit="calls") == 2
    assert value(scene, "thread_limit", "model", thread_id="thread-1") == 9


async def test_a_key_that_can_hold_no_count(signals: Signals) -> None:
    """A limit's name, and a key without its window, are refused with what to write instead."""
    store = MemoryStore()
    monthly = Quota(1, per="user_id", window="month")
    given: Any = {"store": store, "context": ANN}
    limits, prices = [CostLimit(quotas=[monthly])], lambda _: Decimal(1)
    scene = await Scene(signals, lambda _: "done", limits, prices=prices, **given).played()
    key = "model.nanodollars:user_id:ann"
    for name in ("cost", "nanodollars"):
        with pytest.raises(ValueError, match=f"under '{name}:user_id:ann': write '{key}'$"):
            store.grant(f"{name}:user_id:ann", 1, window=None)
    with pytest.raises(ValueError, match=f"under '{key}': give the quota's window, window="):
        await store.agrant(key, 1)
    assert store.grants() == []
    store.grant(key, 1, window=monthly.period)
    await scene.play()
    assert scene.last_text() == "done"
    # In advance; and a tool may have the name of a limit.
    store.grant("search:user_id:ann", 1, window=None)
    tool = ToolCallLimit("cost", quotas=[Quota(1, per="user_id")])
    await Scene(signals, asking("cost"), [tool], tools=["cost"], **given).play()
    store.grant("cost:user_id:ann", 1)


async def test_no_store_that_gives_grants(signals: Signals) -> None:
    """Only a store gives grants, which a user's own need not do."""
    store = MemoryStore()

    class Own:
        """Keeps counts alone."""

        acquire, aacquire = store.acquire, store.aacquire
        peek, apeek, reset, areset = store.peek, store.apeek, store.reset, store.areset

    for own, name in ((None, "None: pass sto"), (Own(), "<")):
        scene = scene_of(signals, SEARCH, store=own)
        with pytest.raises(TypeError, match=f"grants and freezes need .*, not {name}"):
            await scene.call("grant", "tool:search", 1, thread="thread-1")


@tool(return_direct=True)
def report() -> str:
    """Report at once."""
    return "reported"


def asking_scene(signals: Signals, script: Any, **search: Any) -> Scene:
    form, kind = search.pop("form", "async"), search.pop("kind", "quota")
    limits: list[Limit] = [
        ModelCallLimit(thread_limit=9),
        ToolCallLimit("search", **(search or {"thread_limit": 2})),
        ToolCallLimit(thread_limit=9),
    ]
    ask = recording("ask", [], lambda: interrupt("what?"))
    return Scene(signals, script, limits, kind=kind, form=form, tools=["search", report, ask])


@pytest.mark.parametrize("given", [None, 5, {"messages": []}, "thread-1"], ids=repr)
def test_usage_is_read_from_a_state(given: Any) -> None:
    """What a run gives, and what is no state, is a TypeError that says where a state is from."""
    with pytest.raises(TypeError, match=r"agent\.get_state\(config\) gives, not ") as caught:
        usage(given)
    assert str(caught.value).endswith(repr(given))


async def test_the_state_is_plain_json(signals: Signals) -> None:
    """In the middle of a run, too: so any serializer of checkpoints reads back what it wrote."""
    scene = await asking_scene(signals, [["search", "search", "ask", "search"], "done"]).played()
    for _ in range(2):
        state = {key: value for key, value in scene.state().items() if key != "messages"}
        assert state["langchain_quota"]
        assert json.loads(json.dumps(state)) == state
        await scene.resume("that")
    assert scene.ran == ["search", "search"]


async def test_model_calls_are_counted_beside_a_budget_alone(signals: Signals) -> None:
    """With nothing but a budget the model calls of a thread and of its run are counted."""
    scene = Scene(signals, [["search"], "done"] * 2, [TokenLimit(run_limit=10**6)])
    for turn in (1, 2):
        await scene.play()
        assert (scene.usage().model, scene.usage().run_model) == (2 * turn, 2)


@both_forms
@either
async def test_reset_gives_the_quota_back(form: Form, kind: Kind, signals: Signals) -> None:
    """After a reset a thread has its whole limit, and nothing is pending, not even after a tool."""
    script = [["search", "search"], "done", ["search"], "done", ["report"], "done"]
    scene = await asking_scene(signals, script, form=form, kind=kind).played()
    messages = len(scene.state()["messages"])
    await scene.reset()
    assert (scene.usage().model, dict(scene.usage().tools)) == (0, {})
    snapshot = scene.agent.get_state(scene.config)
    assert (snapshot.next, len(snapshot.values["messages"])) == ((), messages)
    await scene.play()
    assert dict(scene.usage().tools) == {"search": 1, "__all__": 1}
    await scene.play()
    await scene.reset()
    assert scene.agent.get_state(scene.config).next == ()
    assert scene.usage().model == 0


def broken(_state: Any, _runtime: Any) -> int:
    raise ConnectionError("no plan")


@both_forms
@pytest.mark.parametrize(
    ("script", "limit", "match"),
    [
        ([], {}, "thread 'thread-1' has no state"),
        ([["search", "ask"]], {}, "waits in mid-run before tools"),
        ([["search"], ConnectionError("down")], {}, "waits in mid-run before model"),
        (["done"], {"thread_limit": broken}, "waits in mid-run before"),
    ],
    ids=["fresh", "interrupted", "failed", "failed in our own node"],
)
async def test_a_thread_that_cannot_be_reset(
    form: Form, script: Any, limit: Any, match: str, signals: Signals
) -> None:
    """A thread without a state, or whose run has ended neither by itself nor at a limit."""
    scene = asking_scene(signals, script, form=form, **limit)
    if script:
        try:
            await scene.play()
        except ConnectionError:
            assert "failed" not in match
    before = scene.usage()
    with pytest.raises(RuntimeError, match=match):
        await scene.reset()
    assert scene.usage() == before


@both_forms
async def test_reset_elsewhere(form: Form, signals: Signals) -> None:
    """What is no agent of this process, or does not have the middleware, is refused by name."""
    scene = asking_scene(signals, ["done"], form=form)
    agent, scene.agent = scene.agent, SimpleNamespace(nodes={})
    with pytest.raises(TypeError, match="not a SimpleNamespace: do this where the agent runs"):
        await scene.reset()
    scene.agent = agent
    scene.quota = type("Other", (QuotaMiddleware,), {})([ToolCallLimit(run_limit=1)])
    with pytest.raises(ValueError, match="does not have the middleware Other"):
        await scene.reset()

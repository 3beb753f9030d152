"""At a limit that asks a person: they grant more, or end the run; what is granted is kept once.

In between a process is killed, two are given the answer at once, or the store's reply is lost.
"""

import asyncio
import sys
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any
from unittest.mock import Mock

import pytest
from langchain.agents.middleware.human_in_the_loop import HITLRequest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from pydantic import TypeAdapter

from langchain_quota import CostLimit, MemoryStore, Quota, ToolCallLimit
from langchain_quota.core.decision import Answer
from langchain_quota.errors import QuotaStoreError
from langchain_quota.limits import Limit
from langchain_quota.limits.call import ModelUsage
from langchain_quota.testing import captured_decisions
from tests.scene import ANN, CONFIG, Form, Scene, asking, both_forms, check_history, delegate, texts
from tests.stores import Clock, UnsureStore
from tests.telemetry import Signals
from tests.tokens import answer as spending

SEARCH = ToolCallLimit("search", run_limit=1, exit_behavior="ask")
THREAD = ToolCallLimit("search", thread_limit=1, exit_behavior="ask")


def answer(kind: str, **said: Any) -> dict[str, Any]:
    """What an interface resumes with."""
    return {"decisions": [{"type": kind, **said}]}


def amount(given: object) -> dict[str, Any]:
    """An approval with another amount than the question offers."""
    return answer("approve", amount=given)


APPROVE, REJECT = answer("approve"), answer("reject")


class Asking(Scene):
    """An agent whose limits ask."""

    def questions(self) -> list[Any]:
        """The questions that wait for an answer."""
        return [*self.agent.get_state(self.config).interrupts]

    def question(self) -> tuple[dict[str, Any], str]:
        """What the question that waits offers, and says."""
        (waiting,) = self.questions()
        asked = TypeAdapter(HITLRequest).validate_python(waiting.value)
        (action,) = asked["action_requests"]
        assert asked["review_configs"] == [
            {"action_name": action["name"], "allowed_decisions": ["approve", "reject"]}
        ]
        return action["args"], action["description"]

    def offers(self, **args: Any) -> bool:
        """Whether the question that waits offers so much more, by limit."""
        return self.question()[0] == {name.replace("_", ":"): each for name, each in args.items()}

    def outcomes(self) -> list[str]:
        return [str(each.outcome) for each in self.decisions if each.call.kind == "tool"]

    def count(self, name: str, **labels: str) -> float:
        return self.signals.value(f"langchain_quota_{name}", agent="unnamed", **labels) or 0


@pytest.mark.parametrize("kind", ["quota", "graph"])
async def test_interfaces_can_show_a_form(signals: Signals, kind: Any) -> None:
    """The question has a schema that all usable answers fit; any answer is still read by us."""
    jsonschema = pytest.importorskip("jsonschema")
    scene = await Asking(signals, [["search", "search"], "done"], [SEARCH], kind=kind).played()
    (asked,) = scene.questions()
    if not hasattr(asked, "response_schema"):
        pytest.skip("this LangGraph takes no schema")
    schema: Any = asked.response_schema
    fits = jsonschema.Draft202012Validator(schema).is_valid
    usable = (APPROVE, REJECT, amount(2), answer("reject", message="No.", by="bo"))
    others: tuple[Any, ...] = ({}, "yes", {"decisions": []}, answer("edit"), amount("3"))
    assert [[*map(fits, each)] for each in (usable, others)] == [[True] * 4, [False] * 5]
    fields = schema["properties"]["decisions"]["items"]["properties"]
    assert "in calls" in fields["amount"]["description"]
    await scene.resume("yes")
    assert "could not be used" in scene.question()[1]
    await scene.resume(APPROVE)
    assert scene.ran == ["search", "search"]


async def test_the_root_run_knows_what_was_approved(signals: Signals) -> None:
    """A store that drops the count of a root run gets it back, with what was approved."""
    clock = Clock()
    store = MemoryStore(clock=clock, idle_ttl=timedelta(hours=1))

    def script(messages: Any) -> Any:
        ran = sum(each.type == "tool" for each in messages)
        clock.now += 2 * 3600 * (ran == 2)
        return "done" if ran == 4 else ["calc"] if ran else ["search", "search"]

    of_root = ToolCallLimit(quotas=[Quota(3, per="root_run")])
    scene = Asking(signals, script, [SEARCH, of_root], store=store)
    await scene.play()
    await scene.resume(APPROVE)
    assert scene.outcomes() == ["allowed", "allowed", "allowed", "blocked"]


@both_forms
async def test_approved(signals: Signals, form: Form, caplog: pytest.LogCaptureFixture) -> None:
    """What is approved runs, once, and so does what needed no approval; the run goes on."""
    scene = Asking(signals, [["search", "search", "calc"], "done"], [SEARCH], form=form)
    caplog.set_level("INFO", "langchain_quota")
    await scene.play()
    assert (scene.ran, scene.decisions[1:]) == ([], [])
    assert scene.offers(tool_search=1)
    assert scene.question()[1] == (
        "'search' tool call limit reached: run limit exceeded (2/1 calls). Approve to "
        "allow 1 more call for 'tool:search'. Reject to end the run."
    )
    result = await scene.resume(answer("approve", by="bo", message="ticket 4711"))
    assert sorted(scene.ran) == ["calc", "search", "search"]
    assert scene.outcomes() == ["allowed"] * 3
    assert len(scene.model.calls) == 2
    assert scene.usage().run_tools == {"search": 2}
    check_history(result["messages"])
    assert [each.getMessage() for each in caplog.records][:2] == [
        "agent 'unnamed' asks a person whether it may go on at 'tool:search'",
        "agent 'unnamed' was answered 'approve' at 'tool:search', by 'bo'",
    ]
    assert scene.count("questions_total", limit="tool:search", event="asked") == 1
    assert scene.count("questions_total", limit="tool:search", event="approve") == 1
    assert scene.count("granted_total", limit="tool:search", scope="run", unit="calls") == 1
    assert scene.count("runs_ended_total", limit="tool:search") == 0


@pytest.mark.parametrize(
    ("limit", "offered"),
    [
        (ToolCallLimit("search", run_limit=1, exit_behavior="ask", grant=2), [2, 4]),
        (ToolCallLimit("search", thread_limit=0, exit_behavior="ask"), [2, 5]),
        (ToolCallLimit("search", thread_limit=lambda *_: 1, exit_behavior="ask"), [1, 5]),
    ],
)
async def test_what_is_offered(signals: Signals, limit: Limit, offered: list[int]) -> None:
    """`grant` says how much, or the limit, but never less than the calls need."""
    scene = await Asking(signals, [["search"] * 2, ["search"] * 5, "done"], [limit]).played()
    for each in offered:
        assert scene.offers(tool_search=each)
        assert f"Approve to allow {each} more call{'s' * (each > 1)} for" in scene.question()[1]
        await scene.resume(APPROVE)
    assert scene.ran == ["search"] * 7


def dollars(model: ModelUsage) -> Decimal:
    """A thousandth of a dollar for each token."""
    return Decimal(model.total_tokens) / 1000


@pytest.mark.parametrize("store", [None, MemoryStore], ids=["state", "store"])
async def test_dollars(signals: Signals, store: Any) -> None:
    """Dollars are offered as text, and are given as people write them; metrics have dollars."""
    limit = CostLimit(run_limit="1.50", exit_behavior="ask", grant="0.25", name="cost")
    script = [spending(each, "calc") for each in (1500, 299, 2)]
    scene = await Asking(signals, script, [limit], prices=dollars, store=store and store()).played()
    assert scene.offers(cost="0.25")
    assert scene.question()[1].startswith("Cost limits exceeded: run limit ($1.50/$1.50). Approve")
    assert "allow $0.25 more for 'cost'" in scene.question()[1]
    for wrong in (True, "$1", 0.0000000001, 9_000_000.1):
        await scene.resume(amount(wrong))
        assert "The answer could not be used: " in scene.question()[1]
    await scene.resume(amount("0.30"))
    assert len(scene.model.calls) == 3
    assert scene.count("granted_total", limit="cost", scope="run", unit="dollars") == 0.3
    assert scene.offers(cost="0.25")


async def test_how_long_it_lasts(signals: Signals) -> None:
    """What is granted to a run ends with it; to a thread, it lasts as long as the thread."""
    script = [["search"] * 2, "done", ["search"] * 2, "done"]
    for limit, ran in ((SEARCH, 2), (replace(THREAD, grant=3), 4)):
        scene = await Asking(signals, script, [limit]).played()
        await scene.resume(APPROVE)
        await scene.play()
        assert len(scene.ran) == ran
        assert bool(scene.questions()) is (limit is SEARCH)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("yes", "not 'yes'"),
        ({"decisions": []}, "it must be"),
        ({"decisions": [{"type": "approve"}, {"type": "approve"}]}, "it must be"),
        ({"decisions": ["approve"]}, "it must be"),
        (answer("respond", message="hm"), "it must be"),
        (answer("edit", edited_action={"name": "raise_limits", "args": {}}), "it must be"),
        (amount(-1), '"amount" must be 0 or more, not -1'),
        (amount(1.5), '"amount" must be a whole number, not 1.5'),
        (amount(True), "not True"),
        (amount("2"), "not '2': write 2"),
        (amount(9 * 10**15 + 1), '"amount" must be at most 9000000000000000, not'),
    ],
    ids=str,
)
async def test_unusable_answers(signals: Signals, given: Any, problem: str) -> None:
    """The question comes again and says why; then a good answer works."""
    calc = ToolCallLimit("calc", run_limit=1, exit_behavior="ask")
    scene = Asking(signals, [["search"] * 2, "done"], [SEARCH, calc], store=MemoryStore())
    await scene.play()
    await scene.resume(given)
    assert scene.offers(tool_search=1)
    text = scene.question()[1]
    assert text.startswith("The answer could not be used: ")
    assert problem in text
    assert scene.ran == []
    await scene.resume(APPROVE)
    assert scene.ran == ["search"] * 2
    assert scene.count("questions_total", limit="tool:search", event="asked") == 2
    assert scene.count("questions_total", limit="tool:search", event="approve") == 1


INBOX = {"action": "raise_limits", "args": {"tool:search": 1}}
BY = {"langgraph_auth_user_id": "auth"}
SERVED = {**BY, "served": True}
"""As LangGraph's server gives it, which has checked the user."""


@pytest.mark.parametrize(
    ("resumed", "user", "read"),
    [
        (answer("approve", by="bo"), {}, Answer("approve", {"tool:search": 1}, "bo")),
        ({**APPROVE, "by": "bo"}, {}, Answer("approve", {"tool:search": 1}, "bo")),
        (answer("approve", by="bo"), BY, Answer("approve", {"tool:search": 1}, "bo")),
        (answer("approve", by="bo"), SERVED, Answer("approve", {"tool:search": 1}, "auth")),
        (amount(None), {}, Answer("approve", {"tool:search": 1})),
        (amount(2), {}, Answer("approve", {"tool:search": 2})),
        (answer("approve", args=INBOX), {}, Answer("approve", {"tool:search": 1})),
        (answer("reject", args="Not today."), {}, Answer("reject", message="Not today.")),
    ],
)
async def test_how_answers_are_read(
    signals: Signals, monkeypatch: Any, resumed: Any, user: dict[str, Any], read: Answer
) -> None:
    """LangGraph's server says who answers, no other config; Agent Inbox has other names."""
    if "served" in user:
        monkeypatch.setitem(sys.modules, "langgraph_api", sys)
    scene = await Asking(signals, [["search"] * 2, "done"], [SEARCH]).played()
    config: Any = {"configurable": {"thread_id": "thread-1", **user}}
    with captured_decisions() as decisions:
        await scene.agent.ainvoke(Command(resume=resumed), config)
    answers = [each.answer for each in decisions if each.answer is not None]
    assert answers == [read] * 2


async def test_a_grant_that_would_end_the_run(signals: Signals) -> None:
    """Nobody is asked if the calls that a grant lets past one limit end the run at another."""
    forbidden = ToolCallLimit("search", run_limit=0, exit_behavior="ask", name="asks")
    beside = ToolCallLimit("search", thread_limit=2, run_limit=1, name="beside")
    hard = ToolCallLimit(run_limit=2, exit_behavior="end", name="hard")
    scene = Asking(signals, [["search", "search", "calc"], "done"], [forbidden, beside, hard])
    result = await scene.play()
    assert scene.questions() == []
    assert scene.ran == ["calc"]
    assert result["messages"][-1].content == "done"


async def test_two_sub_agents_in_parallel(signals: Signals) -> None:
    """Each asks its own question, which is the parent's to answer, and gets its own answer."""
    script = [["search"] * 2, "found", "found"]
    children = {
        name: Asking(signals, script, [SEARCH], name=name, checkpointer=None)
        for name in ("one", "two")
    }
    tools = [delegate(child.agent, name) for name, child in children.items()]
    parent = await Asking(signals, asking(*children), tools=tools).played()
    first, second = parent.questions()
    for each in (first, second):
        assert each.value["action_requests"][0]["args"] == {"tool:search": 1}
    result = await parent.resume(
        {first.id: APPROVE, second.id: answer("reject", message="Not you.")}
    )
    assert sorted(len(each.ran) for each in children.values()) == [0, 2]
    assert sorted(texts(result)) == ["Not you.", "found"]
    check_history(result["messages"])


async def test_an_exhausted_tool_is_offered(signals: Signals) -> None:
    """Who hides what is exhausted still offers a tool whose limit asks, and says so."""
    hidden = ToolCallLimit("calc", run_limit=1)
    script = [["search", "calc"], ["search"], "done"]
    options: dict[str, Any] = {"hide_exhausted": True, "tell_model": True}
    scene = Asking(signals, script, [SEARCH, hidden], **options)
    streamed = await scene.updates({"messages": [("user", "hi")]})
    assert list(streamed[-1]) == ["__interrupt__"]
    assert scene.model.calls[1].tools == ("search",)
    told = str(scene.model.calls[1].messages[-1].content)
    assert "search: 0 of 1 left (then a person is asked for more); calc: 0 of 1 left." in told
    assert scene.offers(tool_search=1)


@pytest.mark.parametrize(("outage", "ran"), [("block", 0), ("allow", 1)])
async def test_no_store_before_the_question(signals: Signals, outage: Any, ran: int) -> None:
    """Nobody is asked for what could not be granted: the calls are refused, or allowed."""
    store, script = UnsureStore(), [["search"], ["search"], ["search"], "done"]
    scene = Asking(signals, script, [THREAD], store=store, on_store_error=outage)
    store.down = True
    result = await scene.play()
    assert scene.questions() == []
    assert (scene.ran, result["messages"][-1].content) == (["search"] * ran, "done")


async def test_what_cannot_be_asked(signals: Signals) -> None:
    """A run that could not wait does not begin, and a thread that waits is not reset."""
    scene = Asking(signals, ["done"], [SEARCH], checkpointer=None)
    with pytest.raises(RuntimeError, match=r"limit 'tool:search' has exit_behavior='ask', and"):
        await scene.play()
    assert scene.model.calls == ()
    scene = await Asking(signals, [["search"] * 2, "done"], [THREAD]).played()
    with pytest.raises(RuntimeError, match="waits in mid-run"):
        scene.quota.reset(scene.agent, CONFIG)
    await scene.resume(APPROVE)
    assert scene.ran == ["search"] * 2


class Killed(BaseException):
    """The process is dead: nobody handles it."""


APPROVED = answer("approve", by="bo", message="4711")
CHECKED_AGAIN = 3
"""The reply to the check after the grant; before it come the first check's and the grant's."""


async def two_processes(signals: Signals, store: UnsureStore) -> tuple[Scene, Scene]:
    """Processes that share a user's day, and a run that waits for an answer."""
    limit = ToolCallLimit("search", quotas=[Quota(2, per="user_id")], exit_behavior="ask", grant=3)
    given: Any = {"store": store, "context": ANN, "ran": [], "checkpointer": InMemorySaver()}
    one, two = (Scene(signals, asking(*["search"] * 3), [limit], **given) for _ in "12")
    assert (await one.play())["__interrupt__"]
    return one, two


def check_once(store: UnsureStore) -> None:
    """Assert that what a person has granted, and what three calls use, is counted once."""
    granted = [(each.amount, each.by, each.reason) for each in store.grants()]
    assert (granted, [each.used for each in store.usages()]) == ([(3, "bo", "4711")], [3])


@pytest.mark.parametrize("again", [APPROVED, None])
@pytest.mark.parametrize("reply", [CHECKED_AGAIN - 1, CHECKED_AGAIN])
async def test_killed_after_the_answer(reply: int, again: Any, signals: Signals) -> None:
    """A process that ends between grant and call has granted once, and loses no call."""
    store = UnsureStore()
    one, two = await two_processes(signals, store)
    store.lost, store.happens = reply, Mock(side_effect=Killed)
    with pytest.raises(Killed):
        await one.resume(APPROVED)
    assert one.ran == []
    result = await (two.go_on() if again is None else two.resume(again))
    assert texts(result) == ["search ran"] * len(two.ran) == ["search ran"] * 3
    check_once(store)


async def test_the_store_goes_down_between_two_grants(signals: Signals) -> None:
    """Of two limits one is granted more; the run is resumed again, and so is the other one."""
    store, limits = UnsureStore(), [replace(SEARCH, name="run"), THREAD]
    scene = await Asking(signals, [["search"] * 2, "done"], limits, store=store).played()
    store.lost = 2
    with pytest.raises(QuotaStoreError, match="when the store answers; the answer is kept"):
        await scene.resume(amount(2))
    assert [each.amount for each in store.grants()] == [2]
    await scene.go_on()
    assert scene.questions() == []
    assert scene.ran == ["search"] * 2
    assert [each.amount for each in store.grants()] == [2, 2]
    assert scene.count("questions_total", limit="run", event="approve") == 1


@pytest.mark.parametrize("reply", [1, CHECKED_AGAIN])
async def test_resumed_twice_at_once(reply: int, signals: Signals) -> None:
    """A question that two processes are resumed with at once grants once, and is charged once."""
    store, reached, go = UnsureStore(), asyncio.Event(), asyncio.Event()
    one, two = await two_processes(signals, store)

    async def wait() -> None:
        reached.set()
        await go.wait()

    store.lost, store.happens = reply, wait
    first = asyncio.create_task(one.resume(APPROVED))
    await asyncio.wait_for(reached.wait(), 60)
    await two.resume(APPROVED)
    go.set()
    await first
    # LangGraph may run the step in both processes.
    assert len(two.ran) >= 3
    check_once(store)

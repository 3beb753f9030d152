"""At a limit that asks a person: they grant more, or end the run; what is granted is kept once."""

from collections.abc import Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from langchain.agents.middleware.human_in_the_loop import HITLRequest
from langchain_core.messages import AIMessage, ToolCall
from langchain_core.messages.ai import UsageMetadata
from langgraph.types import Command
from prometheus_client import CollectorRegistry
from pydantic import TypeAdapter

from langchain_quota import (
    CostLimit,
    Decision,
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    ModelUsage,
    Quota,
    QuotaMiddleware,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    usage,
)
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores.grants import Grant, Granting
from tests.scene import Form, Scene, both_forms, check_history
from tests.signals import Signals, needs_inline
from tests.stores import FickleStore

SEARCH = ToolCallLimit("search", run_limit=1, exit_behavior="ask")
MODEL = ModelCallLimit(run_limit=1, exit_behavior="ask")
CONFIG: Any = {"configurable": {"thread_id": "thread-1"}}
DAY = timedelta(days=1)


def answer(kind: str, **said: Any) -> dict[str, Any]:
    """What an interface resumes with."""
    return {"decisions": [{"type": kind, **said}]}


def amount(given: object) -> dict[str, Any]:
    """An approval with another amount than the question offers."""
    return answer("approve", amount=given)


APPROVE, REJECT = answer("approve"), answer("reject")


class Asking(Scene):
    """An agent with one QuotaMiddleware, and what was decided."""

    def __init__(
        self,
        signals: Signals,
        script: Any,
        *limits: Any,
        beside: Sequence[Any] = (),
        before: Sequence[Any] = (),
        quota: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.decisions: list[Decision] = []
        self.quota: QuotaMiddleware[Any, Any] = QuotaMiddleware(
            [*limits],
            on_decision=self.decisions.append,
            **{"telemetry": signals.telemetry, **(quota or {})},
        )
        super().__init__(signals, script, [*before, self.quota, *beside], **options)

    def questions(self) -> list[Any]:
        """The payloads that wait for an answer."""
        return [each.value for each in self.agent.get_state(CONFIG).interrupts]

    def question(self) -> tuple[dict[str, Any], str]:
        """What the one that waits offers, and says."""
        (asked,) = self.questions()
        TypeAdapter(HITLRequest).validate_python(asked)
        (action,) = asked["action_requests"]
        assert asked["review_configs"] == [
            {"action_name": action["name"], "allowed_decisions": ["approve", "reject"]}
        ]
        return action["args"], action["description"]

    def outcomes(self, kind: str = "tool") -> list[str]:
        return [str(each.outcome) for each in self.decisions if each.call.kind == kind]

    def count(self, name: str, **labels: str) -> float:
        return self.signals.value(f"langchain_quota_{name}", agent="unnamed", **labels) or 0


class TestToolCalls:
    """Calls of tools over a limit."""

    @both_forms
    async def test_rejected(self, signals: Signals, form: Form) -> None:
        """A rejected run ends with the person's words; no call of the batch runs."""
        scene = Asking(signals, [["search", "search"]], SEARCH, form=form)
        await scene.play()
        result = await scene.resume(answer("reject", message="That is enough, thanks."))
        assert result["messages"][-1].content == "That is enough, thanks."
        assert scene.ran == []
        assert scene.outcomes() == ["skipped", "blocked"]
        assert usage(scene.agent.get_state(CONFIG)).run_tools.get("search", 0) == 0
        check_history(result["messages"])

    async def test_rejected_without_a_word(self, signals: Signals) -> None:
        """Without a message a rejected run ends with the limit's own text."""
        scene = Asking(signals, [["search", "search"]], SEARCH)
        await scene.play()
        result = await scene.resume(REJECT)
        assert "run limit exceeded" in result["messages"][-1].content

    async def test_grant(self, signals: Signals) -> None:
        """`grant` says how much is offered, but never less than the calls need."""
        limit = ToolCallLimit("search", run_limit=1, exit_behavior="ask", grant=2)
        scene = Asking(signals, [["search"] * 2, ["search"] * 5, "done"], limit)
        await scene.play()
        assert scene.question()[0] == {"tool:search": 2}
        await scene.resume(APPROVE)
        assert scene.question()[0] == {"tool:search": 4}
        await scene.resume(APPROVE)
        assert scene.ran == ["search"] * 7

    async def test_a_limit_of_0(self, signals: Signals) -> None:
        """A tool that is forbidden is allowed call by call."""
        limit = ToolCallLimit("search", thread_limit=0, exit_behavior="ask")
        scene = Asking(signals, [["search"], "done"], limit)
        await scene.play()
        assert scene.question()[0] == {"tool:search": 1}
        await scene.resume(APPROVE)
        assert scene.ran == ["search"]


async def test_one_amount_for_two_units(signals: Signals) -> None:
    """Where calls and tokens are asked about at once, an amount cannot be meant for both."""
    tokens = TokenLimit(run_limit=10, exit_behavior="ask", name="tokens")
    scene = Asking(signals, [used(10, "calc"), "done"], MODEL, tokens)
    await scene.play()
    assert scene.question()[0] == {"model": 1, "tokens": 10}
    await scene.resume(amount(5))
    args, text = scene.question()
    assert args == {"model": 1, "tokens": 10}
    assert "limits 'model', 'tokens' do not count the same: approve without" in text
    result = await scene.resume(APPROVE)
    assert result["messages"][-1].content == "done"


class TestScopes:
    """How long a grant lasts."""

    async def test_a_run(self, signals: Signals) -> None:
        """What is granted to a run ends with it."""
        scene = Asking(signals, [["search"] * 2, "done", ["search"] * 2], SEARCH)
        await scene.play()
        await scene.resume(APPROVE)
        await scene.play()
        assert scene.question()[0] == {"tool:search": 1}
        assert scene.ran == ["search"] * 2

    async def test_a_thread(self, signals: Signals) -> None:
        """What is granted to a thread lasts as long as the thread."""
        limit = ToolCallLimit("search", thread_limit=1, exit_behavior="ask", grant=3)
        scene = Asking(signals, [["search"] * 2, "done", ["search"] * 2, "done"], limit)
        await scene.play()
        await scene.resume(APPROVE)
        await scene.play()
        assert scene.questions() == []
        assert scene.ran == ["search"] * 4
        assert usage(scene.agent.get_state(CONFIG)).tools == {"search": 4}


class TestUnusable:
    """Answers that are none."""

    @pytest.mark.parametrize(
        ("given", "problem"),
        [
            ("yes", "not 'yes'"),
            ({"decisions": []}, "it must be"),
            ({"decisions": [{"type": "approve"}, {"type": "approve"}]}, "it must be"),
            (answer("respond", message="hm"), "it must be"),
            (answer("edit", edited_action={"name": "raise_limits", "args": {}}), "it must be"),
            (amount(-1), '"amount" must be 0 or more, not -1'),
            (amount(1.5), '"amount" must be a whole number or None, not 1.5'),
            (amount(True), "not True"),
            (amount("2"), "not '2': write 2"),
            (amount(10**18), "not 1000000000000000000"),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("store", [None, MemoryStore], ids=["state", "store"])
    async def test_asked_again(
        self, signals: Signals, given: Any, problem: str, store: Any
    ) -> None:
        """The question comes again and says why; then a good answer works."""
        kept = store() if store else None
        calc = ToolCallLimit("calc", run_limit=1, exit_behavior="ask")
        scene = Asking(signals, [["search"] * 2, "done"], SEARCH, calc, quota={"store": kept})
        await scene.play()
        await scene.resume(given)
        args, text = scene.question()
        assert args == {"tool:search": 1}
        assert text.startswith("The answer could not be used: ")
        assert problem in text
        assert scene.ran == []
        await scene.resume(APPROVE)
        assert scene.ran == ["search"] * 2
        assert scene.count("questions_total", limit="tool:search") == 2
        assert scene.count("answers_total", limit="tool:search", answer="approve") == 1


class TestWho:
    """Who has answered."""

    @pytest.mark.parametrize(
        ("resumed", "user", "by"),
        [
            (answer("approve", by="bo"), None, "bo"),
            ({**APPROVE, "by": "bo"}, None, "bo"),
            (answer("approve", by="bo"), "auth", "auth"),
            (APPROVE, None, ""),
        ],
    )
    async def test_by(self, signals: Signals, resumed: Any, user: Any, by: str) -> None:
        """LangGraph's authentication says it, or the answer."""
        scene = Asking(signals, [["search"] * 2, "done"], SEARCH)
        await scene.play()
        config: Any = {"configurable": {"thread_id": "thread-1"}}
        if user:
            config["configurable"]["langgraph_auth_user_id"] = user
        await scene.agent.ainvoke(Command(resume=resumed), config)
        assert [each.answer and each.answer.by for each in scene.decisions] == [None, by, by, None]


def used(tokens: int, *tools: str, number: int = 0) -> AIMessage:
    """What a model answers that has used so many tokens."""
    calls = [ToolCall(name=tool, args={}, id=f"{number}.{i}") for i, tool in enumerate(tools)]
    counts = UsageMetadata(input_tokens=tokens - 1, output_tokens=1, total_tokens=tokens)
    return AIMessage("" if tools else "done", tool_calls=calls, usage_metadata=counts)


def dollars(model: ModelUsage) -> Decimal:
    """A thousandth of a dollar for each token."""
    return Decimal(model.total_tokens) / 1000


@pytest.mark.parametrize("has_store", [False, True], ids=["state", "store"])
class TestBudgets:
    """Tokens and dollars."""

    async def test_dollars(self, signals: Signals, has_store: bool) -> None:  # noqa: FBT001
        """Dollars are offered as text, and are given as text; metrics have dollars."""
        limit = CostLimit(run_limit="1.50", exit_behavior="ask", grant="0.25", name="cost")
        script = [used(1500, "calc"), used(299, "calc", number=1), used(2, "calc", number=2)]
        store = MemoryStore() if has_store else None
        quota = {"prices": dollars, "store": store}
        scene = Asking(signals, script, limit, quota=quota)
        await scene.play()
        args, text = scene.question()
        assert args == {"cost": "0.25"}
        assert "allow $0.25 more for 'cost'" in text
        await scene.resume(amount("0.30"))
        assert len(scene.model.calls) == 3
        assert scene.count("granted_dollars_total", limit="cost", scope="run") == 0.3
        assert scene.question()[0] == {"cost": "0.25"}


class TestNotAnswered:
    """A new message in place of an answer."""

    async def test_resumed_without_an_answer(self, signals: Signals) -> None:
        """A run that goes on without an answer asks once more, and counts one question."""
        scene = Asking(signals, [["search"] * 2, "done"], SEARCH)
        await scene.play()
        await scene.go_on()
        assert scene.question()[0] == {"tool:search": 1}
        assert scene.count("questions_total", limit="tool:search") == 1
        await scene.resume(APPROVE)
        assert scene.ran == ["search"] * 2


class TestBesideOtherLimits:
    """A refusal by another limit beside it."""

    async def test_the_run_would_end(self, signals: Signals) -> None:
        """Nobody is asked if the calls that are granted would end the run at another limit."""
        hard = ToolCallLimit(run_limit=2, exit_behavior="end")
        scene = Asking(signals, [["search"] * 3, "done"], SEARCH, hard)
        await scene.play()
        assert scene.questions() == []
        assert scene.ran == ["search"]
        assert scene.answers() == [("search", "error")] * 2 + [("search", "success")]

    async def test_at_once(self, signals: Signals) -> None:
        """Who may run more calls still runs so many at a time."""
        limit = ToolCallLimit("search", run_limit=1, at_once=1, exit_behavior="ask")
        scene = Asking(signals, [["search"] * 3, "done"], limit)
        await scene.play()
        await scene.resume(APPROVE)
        assert scene.ran == ["search"] * 3

    async def test_a_grant_that_would_end_the_run(self, signals: Signals) -> None:
        """Nobody is asked if the calls that a grant lets past one limit end the run at another."""
        forbidden = ToolCallLimit("search", run_limit=0, exit_behavior="ask", name="asks")
        beside = ToolCallLimit("search", thread_limit=2, run_limit=1, name="beside")
        hard = ToolCallLimit(run_limit=2, exit_behavior="end", name="hard")
        script = [["search", "search", "calc"], "done"]
        scene = Asking(signals, script, forbidden, beside, hard)
        result = await scene.play()
        assert scene.questions() == []
        assert scene.ran == ["calc"]
        assert result["messages"][-1].content == "done"


@both_forms
async def test_an_exhausted_tool_is_offered(signals: Signals, form: Form) -> None:
    """Who hides what is exhausted still offers a tool whose limit asks, and says so."""
    hidden = ToolCallLimit("calc", run_limit=1)
    scene = Asking(
        signals,
        [["search", "calc"], ["search"], "done"],
        SEARCH,
        hidden,
        form=form,
        quota={"hide_exhausted": True, "tell_model": True},
    )
    await scene.play()
    assert scene.model.calls[1].tools == ("search",)
    told = str(scene.model.calls[1].messages[-1].content)
    assert "search: 0 of 1 left (then a person is asked for more); calc: 0 of 1 left." in told
    assert scene.question()[0] == {"tool:search": 1}


USER = Quota(1, per="user_id", window=DAY)
KEY = "search:user_id:ada"
SHARED = ToolCallLimit("search", quotas=[USER], exit_behavior="ask", grant=5)


class Shared(Asking):
    """An agent whose quotas a store counts, for one user."""

    def __init__(
        self, signals: Signals, script: Any, *limits: Any, store: Any, **options: Any
    ) -> None:
        self.store = store
        options["context_schema"] = dict
        super().__init__(signals, script, *limits, quota={"store": store}, **options)

    async def invoke(self, given: Any, config: Any = CONFIG) -> dict[str, Any]:
        context: Any = {"context": {"user_id": "ada"}}
        if self.form == "sync":
            return dict(self.agent.invoke(given, config, durability="sync", **context))
        return dict(await self.agent.ainvoke(given, config, durability="sync", **context))

    def charged(self) -> int:
        """What the store counts of the user's searches."""
        return sum(each.used for each in self.store.usages(f"{KEY}*"))

    def granted(self) -> list[int]:
        return [each.amount for each in self.store.grants(f"{KEY}*")]


@both_forms
class TestShared:
    """Quotas that a store counts."""

    async def test_granted_to_a_user(self, signals: Signals, form: Form) -> None:
        """The grant is the store's, with who gave it and why, and ends with the window."""
        scene = Shared(signals, [["search"] * 2, "done"], SHARED, store=MemoryStore(), form=form)
        await scene.play()
        await scene.resume(answer("approve", by="bo", message="ticket 4711"))
        assert scene.ran == ["search"] * 2
        [grant] = scene.store.grants()
        assert (grant.amount, grant.by, grant.reason) == (5, "bo", "ticket 4711")
        assert grant.key.startswith(KEY)
        assert grant.until is not None
        assert scene.charged() == 2
        assert scene.count("granted_total", limit="tool:search", scope="user_id") == 5

    async def test_too_little_twice(self, signals: Signals, form: Form) -> None:
        """What is granted and not enough is not granted again with the same answer."""
        limit = TokenLimit(
            quotas=[Quota(100, per="user_id", window=DAY)], exit_behavior="ask", name="tokens"
        )
        script = [used(150, "calc")]
        scene = Shared(signals, script, limit, store=MemoryStore(), form=form)
        await scene.play()
        asked = scene.agent.get_state(CONFIG).config
        for _ in range(2):
            result = await scene.invoke(Command(resume=amount(10)), asked)
            assert "limit" in result["messages"][-1].content
            assert [each.amount for each in scene.store.grants()] == [10]

    async def test_granted_while_it_waits(self, signals: Signals, form: Form) -> None:
        """More quota from elsewhere is room, too: of a user, and of a thread."""
        limit = ToolCallLimit("calc", thread_limit=1, exit_behavior="ask")
        script = [["search"] * 2, ["calc"] * 2, "done"]
        scene = Shared(signals, script, SHARED, limit, store=MemoryStore(), form=form)
        await scene.play()
        scene.store.grant(KEY, 1, window=DAY)
        await scene.go_on()
        assert scene.question()[0] == {"tool:calc": 1}
        await scene.quota.agrant(CONFIG, 1)
        await scene.go_on()
        assert scene.ran == ["search"] * 2 + ["calc"] * 2


class TestOutage:
    """A store that cannot be asked."""

    @pytest.mark.parametrize("outage", ["deny", "allow"])
    async def test_before_the_question(self, signals: Signals, outage: Any) -> None:
        """Nobody is asked for what could not be granted: the calls are refused, or allowed."""
        store = Fickle(MemoryStore())
        script = [["search"], ["search"], ["search"], "done"]
        limit = ToolCallLimit("search", thread_limit=1, exit_behavior="ask")
        scene = Asking(signals, script, limit, quota={"store": store, "on_store_error": outage})
        store.down = True
        result = await scene.play()
        assert scene.questions() == []
        assert result["messages"][-1].content == "done"
        assert scene.ran == ["search"] * (1 if outage == "allow" else 0)

    async def test_behind_the_answer(self, signals: Signals) -> None:
        """A grant that fails is an error; the run is resumed again, with the same answer."""
        store = Fickle(MemoryStore())
        limit = ToolCallLimit("search", thread_limit=1, exit_behavior="ask")
        scene = Asking(signals, [["search"] * 2, "done"], limit, quota={"store": store})
        await scene.play()
        store.refuses_grants = "search"
        with pytest.raises(QuotaStoreError):
            await scene.resume(APPROVE)
        store.refuses_grants = None
        await scene.go_on()
        assert scene.ran == ["search"] * 2
        assert [each.amount for each in store.grants()] == [1]
        metric = "langchain_quota_answers_total"
        known = {"agent": "unnamed", "limit": "tool:search", "answer": "approve"}
        assert signals.value(metric, **known) == 1

    async def test_between_two_grants(self, signals: Signals) -> None:
        """If the store fails after the first of two grants, the same amount gives the second."""
        store = Fickle(MemoryStore())
        limits = [
            ToolCallLimit("search", run_limit=0, exit_behavior="ask", name="run"),
            ToolCallLimit("search", thread_limit=0, exit_behavior="ask", name="thread"),
        ]
        scene = Asking(signals, [["search"], "done"], *limits, quota={"store": store})
        await scene.play()
        store.refuses_grants = ":thread:"
        with pytest.raises(QuotaStoreError):
            await scene.resume(amount(2))
        assert [each.amount for each in store.grants()] == [2]
        store.refuses_grants = None
        await scene.go_on()
        assert scene.questions() == []
        assert scene.ran == ["search"]
        assert [each.amount for each in store.grants()] == [2, 2]


class Fickle(FickleStore, Granting):
    """A store that fails while it is down, or gives no grants for a while."""

    refuses_grants: str | None = None
    """A text in the keys that get none."""
    _idle = 3600

    def grants(self, pattern: str = "*") -> list[Grant]:
        return self.kept.grants(pattern)

    def _now(self) -> float:
        return self.kept._now()

    def _grant(self, asked: Grant) -> tuple[Grant | None, bool]:
        self._fail()
        if self.refuses_grants is not None and self.refuses_grants in asked.key:
            raise QuotaStoreError("the store is down")
        return self.kept._grant(asked)

    async def _agrant(self, asked: Grant) -> tuple[Grant | None, bool]:
        return self._grant(asked)

    def _revoke(self, key: str, name: str) -> Grant | None:
        return self.kept._revoke(key, name)

    async def _arevoke(self, key: str, name: str) -> Grant | None:
        return self._revoke(key, name)


class TestErrors:
    """What cannot be asked is refused, and says why."""

    @both_forms
    async def test_no_checkpointer(self, signals: Signals, form: Form) -> None:
        """A run that could not wait does not begin."""
        scene = Asking(signals, ["done"], SEARCH, checkpointer=None, form=form)
        with pytest.raises(RuntimeError, match=r"limit 'tool:search' has exit_behavior='ask', and"):
            await scene.play()
        assert scene.model.calls == ()

    @needs_inline
    def test_inline(self, signals: Signals) -> None:
        """The inline middleware would call the model again."""
        with pytest.raises(ValueError, match="would call the model again"):
            InlineQuotaMiddleware([SEARCH], telemetry=signals.telemetry)

    async def test_reset_while_it_waits(self, signals: Signals) -> None:
        """A thread that waits is not reset."""
        limit = ToolCallLimit("search", thread_limit=1, exit_behavior="ask")
        scene = Asking(signals, [["search"] * 2, "done"], limit)
        await scene.play()
        with pytest.raises(RuntimeError, match="waits in mid-run"):
            scene.quota.reset(scene.agent, CONFIG)
        await scene.resume(APPROVE)
        assert scene.ran == ["search"] * 2


class TestSignals:
    """What is visible of a question and its answer."""

    async def test_no_call_is_unjudged(self, signals: Signals) -> None:
        """Calls that run after an answer count as judged, also in the next invocation."""
        registry = CollectorRegistry()
        telemetry = Telemetry(registry=registry, spans="off", count_unjudged_calls=True)
        script = [["search"] * 2, ["search"], "done"]
        scene = Asking(signals, script, SEARCH, MODEL, quota={"telemetry": telemetry})
        await scene.play()
        while scene.questions():
            await scene.resume(APPROVE)
        assert scene.ran == ["search"] * 3
        decided = {"agent": "unnamed", "limit": "tool:search", "scope": "none"}
        metric = "langchain_quota_limit_decisions_total"
        assert registry.get_sample_value(metric, {**decided, "decision": "allowed"}) == 3
        samples = [each for family in registry.collect() for each in family.samples]
        assert not [each for each in samples if each.name == "langchain_quota_unjudged_calls_total"]

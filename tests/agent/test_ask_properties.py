"""Random agents on two threads whose limits ask a person, with random answers, against what ran.

1. No more calls run than a limit admits with what was granted on top of it.
2. What state and store count equals what ran, also if a question is answered twice.
3. Only an approval grants: as much as it says, once for each count. It is as usable if a question
   is answered twice.
4. What was offered is enough: an approved call is not refused by a limit that was asked about.
5. Where a run is rejected nothing runs; whatever the model was sent is a valid history.

Meanwhile other calls wait for answers of their own, the other thread uses up the quotas that both
share, answers are unusable, and people write a new message in place of an answer.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, InjectedToolCallId, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt
from prometheus_client import CollectorRegistry

from langchain_quota import (
    Decision,
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    usage,
)
from langchain_quota.decision import Call
from langchain_quota.limits import Limit, check_together
from langchain_quota.resolved import stored_as
from langchain_quota.stores.keys import CountKey
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.scene import check_history

THREADS = ("one", "two")
TOOLS = ("search", "calc", "pause")
"""`pause` waits for an answer of its own."""
TOKENS = 10
"""What each model call uses."""

Grants = Counter[str]
"""What is granted, by the name of the count."""


@dataclass(frozen=True)
class Step:
    """What happens next on a thread.

    Attributes:
        thread: The thread.
        batches: If a run begins: the tool calls that the model makes, message by message.
        reply: What is answered, if somebody is asked.
        amount: The amount that an approval names, if it names one.
        twice: Whether the question is answered twice, from the same checkpoint.
    """

    thread: str
    batches: list[list[str]]
    reply: str
    amount: int | None
    twice: bool


class World:
    """The agent, and all that really happened.

    Args:
        limits: Its limits.
        store: Counts threads, runs and quotas, if there is one.
    """

    def __init__(self, limits: Sequence[Limit], store: MemoryStore | None) -> None:
        self.limits, self.store = limits, store
        self.runs: Counter[str] = Counter()
        # By tool call or number of the model call: the thread, its run, and what ran.
        self.ran: dict[Any, tuple[str, int, Call]] = {}
        self.decisions: list[Decision] = []
        self.model = ScriptedChatModel(script=self._answer)
        quota: QuotaMiddleware[Any, Any] = QuotaMiddleware(
            limits,
            store=store,
            on_decision=self.decisions.append,
            telemetry=Telemetry(registry=CollectorRegistry(), spans="off"),
        )
        self.agent: Any = create_agent(
            self.model,
            [self._tool(name) for name in TOOLS],
            middleware=[quota],
            checkpointer=InMemorySaver(),
        )

    def _answer(self, messages: Sequence[BaseMessage]) -> Turn:
        newest = max(i for i, each in enumerate(messages) if each.type == "human")
        thread, batches = json.loads(messages[newest].text)
        made = sum(isinstance(each, AIMessage) for each in messages[newest:])
        number = len(self.ran)
        self.ran[number] = thread, self.runs[thread], Call("model")
        tools = batches[made] if made < len(batches) else []
        used = UsageMetadata(input_tokens=TOKENS - 1, output_tokens=1, total_tokens=TOKENS)
        calls: Any = [{"name": t, "args": {}, "id": f"{number}.{i}"} for i, t in enumerate(tools)]
        return AIMessage("" if tools else "done", tool_calls=calls, usage_metadata=used)

    def _tool(self, name: str) -> BaseTool:
        def run(config: RunnableConfig, call_id: Annotated[str, InjectedToolCallId]) -> str:
            thread = config["configurable"]["thread_id"]
            self.ran[call_id] = thread, self.runs[thread], Call("tool", name)
            return str(interrupt("Sure?")) if name == "pause" else "ran"

        async def arun(config: RunnableConfig, call_id: Annotated[str, InjectedToolCallId]) -> str:
            return run(config, call_id)

        return StructuredTool.from_function(run, arun, name=name, description=name)

    async def play(self, step: Step) -> None:
        """Do one step, and check what came of it."""
        config: Any = {"configurable": {"thread_id": step.thread}}
        snapshot = await self.agent.aget_state(config)
        waiting = snapshot.interrupts
        before, ran = self.grants(step.thread), len(self.ran)
        self.decisions.clear()
        if not waiting or step.reply == "new run":
            self.runs[step.thread] += 1
            text = json.dumps([step.thread, step.batches])
            await self.agent.ainvoke({"messages": [("user", text)]}, config)
            assert not self.new_grants(step.thread, before)
            return self.check(step.thread)
        offered = [_offered(each.value) for each in waiting if _offered(each.value)]
        replies = {each.id: _reply(step, _offered(each.value)) for each in waiting}
        resumed: Any = Command(resume=replies) if step.reply != "nothing" else None
        if step.twice and offered and resumed is not None:
            # The answer alone: what follows on it is done once.
            first = await self.agent.ainvoke(resumed, snapshot.config, interrupt_after="*")
            granted = self.new_grants(step.thread, before)
            again = await self.agent.ainvoke(resumed, snapshot.config)
            assert self.new_grants(step.thread, before) == granted
            unusable = _was_unusable(again)
            assert unusable is _was_unusable(first)
            if self.store is None or step.reply != "unusable":
                assert unusable is (step.reply == "unusable")
            elif not unusable:
                # Another thread has made room: nobody reads the answer.
                assert not any(each.answer for each in self.decisions)
        else:
            await self.agent.ainvoke(resumed, config)
        self.check_answer(step, offered, self.new_grants(step.thread, before), len(self.ran) - ran)
        return self.check(step.thread)

    def grants(self, thread: str) -> Grants:
        """What is granted."""
        known = self.agent.get_state({"configurable": {"thread_id": thread}}).values
        found: Grants = Counter((known.get("langchain_quota") or {}).get("granted"))
        for each in self.store.grants() if self.store else ():
            found[each.key] += each.amount
        return found

    def new_grants(self, thread: str, before: Grants) -> Grants:
        """What is granted more than before."""
        return self.grants(thread) - before

    def check_answer(self, step: Step, offered: list[Any], granted: Grants, ran: int) -> None:
        """Rules 3, 4 and 5, after a reply to the questions that offered this."""
        answered = [each for each in self.decisions if each.answer is not None]
        if not answered:
            assert not granted
            return
        (args,) = offered
        assert {each.answer.type for each in answered if each.answer} == {step.reply}
        if step.reply == "reject":
            assert not granted
            assert ran == 0
        elif _amount(step, args) is not None:
            assert set(granted.values()) <= {step.amount}
            assert bool(granted) is bool(step.amount)
        else:
            assert granted
            # What a store counts may have grown since the question.
            assert self.store is not None or {*granted.values()} <= {*args.values()}
            assert not any(
                each.refused_by and {status.limit for status in each.refused_by} <= args.keys()
                for each in answered
            )

    def check(self, thread: str) -> None:
        """Rules 1 and 2."""
        granted = self.grants(thread)
        if self.store is None:
            self._check_state(thread, granted)
        else:
            self._check_store(self.store, granted)

    def _check_state(self, thread: str, granted: Mapping[str, int]) -> None:
        used = usage(self.agent.get_state({"configurable": {"thread_id": thread}}))
        for limit in self.limits:
            of_thread = self._ran(limit, thread=thread)
            of_run = self._ran(limit, thread=thread, run=self.runs[thread])
            if isinstance(limit, TokenLimit):
                kept = used.spent.get(limit.counter, 0), used.run_spent.get(limit.counter, 0)
            elif isinstance(limit, ModelCallLimit):
                kept = used.model, used.run_model
            else:
                kept = used.tools.get(limit.counter, 0), used.run_tools.get(limit.counter, 0)
            assert kept == (of_thread, of_run), limit.name
            for scope, count in (("thread", of_thread), ("run", of_run)):
                number = getattr(limit, f"{scope}_limit")
                if number is not None:
                    more = granted[f"{stored_as(limit)}/{scope}"]
                    assert count <= number + more + _over(limit), limit.name

    def _check_store(self, store: MemoryStore, granted: Mapping[str, int]) -> None:
        kept = {each.key: each.used for each in store.usages() if each.used}
        expected: set[tuple[str, str, int]] = set()
        for limit in self.limits:
            for counter, dimension, number, counts in self._stored(limit):
                mine = {
                    key: used
                    for key, used in kept.items()
                    if (CountKey.parse(key).counter, CountKey.parse(key).dimension)
                    == (counter, dimension)
                }
                assert sorted(mine.values()) == sorted(each for each in counts if each), limit.name
                for key, used in mine.items():
                    assert used <= number + granted[key] + _over(limit), limit.name
                expected |= {(counter, dimension, used) for used in mine.values()}

    def _stored(self, limit: Limit) -> Iterator[tuple[str, str, Any, list[int]]]:
        """What a store counts for a limit: counter, dimension, the number, and what ran."""
        name = stored_as(limit)
        runs = [(thread, run) for thread in THREADS for run in range(1, self.runs[thread] + 1)]
        if limit.thread_limit is not None:
            counts = [self._ran(limit, thread=thread) for thread in THREADS]
            yield name, "thread", limit.thread_limit, counts
        if limit.run_limit is not None:
            counts = [self._ran(limit, thread=thread, run=run) for thread, run in runs]
            yield name, "run", limit.run_limit, counts
        for quota in limit.quotas:
            yield name, "global", quota.limit, [self._ran(limit)]

    def _ran(self, limit: Limit, *, thread: str | None = None, run: int | None = None) -> int:
        """How much ran that a limit counts."""
        each_is = TOKENS if isinstance(limit, TokenLimit) else 1
        return each_is * sum(
            limit.matches(call) and thread in {None, where} and run in {None, when}
            for where, when, call in self.ran.values()
        )


def _was_unusable(result: Mapping[str, Any]) -> bool:
    """Whether a question says that the answer before it could not be used."""
    return "could not be used" in str(result.get("__interrupt__"))


def _over(limit: Limit) -> int:
    """What the call that exhausts a limit may use beyond it."""
    return TOKENS - 1 if isinstance(limit, TokenLimit) else 0


def _offered(value: Any) -> dict[str, Any]:
    """What a question of ours offers, by limit; empty for one of a tool."""
    return value["action_requests"][0]["args"] if isinstance(value, dict) else {}


def _amount(step: Step, args: Mapping[str, Any]) -> int | None:
    """The amount of an approval; `None` for what is offered, as for calls and tokens at once."""
    has_one_unit = len({name.startswith("tokens") for name in args}) == 1
    return step.amount if has_one_unit else None


def _reply(step: Step, args: Mapping[str, Any]) -> Any:
    if step.reply == "unusable":
        return {"decisions": ["?"]}
    said: dict[str, Any] = {"type": step.reply}
    amount = _amount(step, args)
    if step.reply == "approve" and amount is not None:
        said["amount"] = amount
    return {"decisions": [said]}


numbers = st.integers(0, 3)


@st.composite
def limits_of(draw: st.DrawFn, *, shared: bool) -> Limit:
    """A limit, which most often asks."""
    kind = draw(st.sampled_from(["search", "calc", "all", "model", "tokens"]))
    scopes = draw(st.sets(st.sampled_from(["run", "thread", *["quota"] * shared]), min_size=1))
    asks = draw(st.sampled_from([True, True, False]))
    unit = TOKENS if kind == "tokens" else 1
    options: dict[str, Any] = {f"{each}_limit": unit * draw(numbers) for each in scopes - {"quota"}}
    if "quota" in scopes:
        options["quotas"] = [Quota(2 * unit * draw(numbers), per="global")]
    if asks:
        grant = draw(st.none() | st.integers(1, 4))
        options |= {"exit_behavior": "ask", "grant": grant and grant * unit}
    elif kind not in {"model", "tokens"}:
        options["exit_behavior"] = draw(st.sampled_from(["continue", "end"]))
    options["name"] = f"{kind} {draw(st.integers(0, 10**6))}"
    try:
        match kind:
            case "model":
                return ModelCallLimit(**options)
            case "tokens":
                return TokenLimit(**options)
        return ToolCallLimit(None if kind == "all" else kind, **options)
    except ValueError:
        reject()


batches = st.lists(st.lists(st.sampled_from(TOOLS), min_size=1, max_size=4), max_size=3)
replies = st.sampled_from(["approve"] * 7 + ["reject", "unusable", "nothing", "new run"])
steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(THREADS),
        batches,
        replies,
        st.none() | numbers,
        st.booleans(),
    ),
    min_size=2,
    max_size=12,
)


def stories_of(*, shared: bool) -> st.SearchStrategy[tuple[bool, list[Limit], list[Step]]]:
    """Whether a store counts, the limits, and what happens."""
    limits = st.lists(limits_of(shared=shared), min_size=1, max_size=4).filter(_may_be_reached)
    return st.tuples(st.just(shared), limits, steps)


def _may_be_reached(limits: Sequence[Limit]) -> bool:
    try:
        check_together(limits)
    except ValueError:
        return False
    return True


ANOTHER_THREAD_HAS_MADE_ROOM: Any = (
    True,
    [ToolCallLimit("search", quotas=[Quota(0, per="global")], exit_behavior="ask", grant=4)],
    [
        Step("one", [["search"]], "nothing", None, twice=False),
        Step("two", [["search"]], "nothing", None, twice=False),
        Step("one", [], "approve", None, twice=False),
        Step("two", [], "unusable", None, twice=True),
    ],
)


def approved(batches: list[list[str]]) -> list[Step]:
    """A run that waits, and an approval."""
    return [Step("one", each, "approve", None, twice=False) for each in (batches, [])]


A_GRANT_LETS_MORE_PAST_ANOTHER_LIMIT: Any = (
    [
        ToolCallLimit("search", run_limit=0, exit_behavior="ask", name="asks"),
        ToolCallLimit("search", thread_limit=2, run_limit=1, name="hard"),
    ],
    approved([["search", "search"]]),
)


@given(st.booleans().flatmap(lambda shared: stories_of(shared=shared)))
@example((False, *A_GRANT_LETS_MORE_PAST_ANOTHER_LIMIT))
@example((True, *A_GRANT_LETS_MORE_PAST_ANOTHER_LIMIT))
@example(ANOTHER_THREAD_HAS_MADE_ROOM)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_random_answers(story: tuple[bool, list[Limit], list[Step]]) -> None:
    """Whatever is asked and answered, calls run, are counted and granted as the rules say."""
    shared, limits, played = story
    world = World(limits, MemoryStore() if shared else None)

    async def play() -> None:
        for step in played:
            await world.play(step)
        for thread in THREADS:
            # Whatever waits comes to its end.
            while world.agent.get_state({"configurable": {"thread_id": thread}}).interrupts:
                await world.play(Step(thread, [], "reject", None, twice=False))
            known = world.agent.get_state({"configurable": {"thread_id": thread}}).values
            if known:
                check_history(known["messages"])

    asyncio.run(play())
    for call in world.model.calls:
        check_history(call.messages)

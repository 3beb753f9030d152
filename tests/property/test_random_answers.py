"""Random agents on two threads whose limits ask a person, with random answers, against what ran.

1. No more calls run than a limit admits with what was granted on top of it.
2. What state and store count equals what ran, also if a question is answered twice.
3. Only an approval grants: as much as it says, once for each count.
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

from hypothesis import example, given, reject
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, InjectedToolCallId, StructuredTool
from langgraph.types import Command, interrupt

from langchain_quota import (
    Decision,
    MemoryStore,
    ModelCallLimit,
    Quota,
    TokenLimit,
    ToolCallLimit,
    usage,
)
from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call
from langchain_quota.testing import Turn
from tests import drawn
from tests.examples import examples
from tests.scene import Scene, check_history
from tests.telemetry import telling

THREADS = ("one", "two")
TOOLS = ("search", "calc", "pause")
"""`pause` waits for an answer of its own."""
TOKENS = 10
"""What each model call uses."""

Grants = Counter[str]
"""What is granted, by the name of the count."""


@dataclass(frozen=True)
class Step:
    """What happens next on a thread: a run with these batches, or a reply to who was asked.

    An approval may name an amount; `twice` is to answer twice, from the same checkpoint.
    """

    thread: str
    batches: list[list[str]]
    reply: str
    amount: int | None = None
    twice: bool = False


class World:
    """The agent, and all that really happened."""

    def __init__(self, limits: Sequence[Limit], store: MemoryStore | None) -> None:
        self.limits, self.store = limits, store
        self.runs: Counter[str] = Counter()
        # By tool call or number of the model call: the thread, its run, and what ran.
        self.ran: dict[Any, tuple[str, int, Call]] = {}
        self.decisions: list[Decision] = []
        self.scene = Scene(
            telling(spans="off"),
            self._answer,
            limits,
            tools=[self._tool(name) for name in TOOLS],
            store=store,
            on_decision=self.decisions.append,
        )
        self.agent = self.scene.agent

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
        async def run(config: RunnableConfig, call_id: Annotated[str, InjectedToolCallId]) -> str:
            thread = config["configurable"]["thread_id"]
            self.ran[call_id] = thread, self.runs[thread], Call("tool", name)
            return str(interrupt("Sure?")) if name == "pause" else "ran"

        return StructuredTool.from_function(coroutine=run, name=name, description=name)

    def snapshot(self, thread: str) -> Any:
        return self.agent.get_state({"configurable": {"thread_id": thread}})

    async def play(self, step: Step) -> None:
        """Do one step, and check what came of it."""
        self.scene.thread_id = step.thread
        snapshot = self.snapshot(step.thread)
        waiting = snapshot.interrupts
        before, ran = self.grants(step.thread), len(self.ran)
        self.decisions.clear()
        if not waiting or step.reply == "new run":
            self.runs[step.thread] += 1
            await self.scene.play(json.dumps([step.thread, step.batches]))
            assert not self.grants(step.thread) - before
            self.check(step.thread)
            return
        offered = [offered_by(each.value) for each in waiting if offered_by(each.value)]
        replies = {each.id: reply_to(step, offered_by(each.value)) for each in waiting}
        resumed: Any = Command(resume=replies) if step.reply != "nothing" else None
        if step.twice and offered and resumed is not None:
            # The answer alone: what follows on it is done once.
            await self.agent.ainvoke(resumed, snapshot.config, interrupt_after="*")
            granted = self.grants(step.thread) - before
            await self.agent.ainvoke(resumed, snapshot.config)
            assert self.grants(step.thread) - before == granted
        else:
            await self.scene.invoke(resumed)
        self.check_answer(step, offered, self.grants(step.thread) - before, len(self.ran) - ran)
        self.check(step.thread)

    def grants(self, thread: str) -> Grants:
        """What is granted."""
        known = self.snapshot(thread).values.get("langchain_quota") or {}
        found: Grants = Counter(known.get("own", {}).get("ask", {}).get("granted"))
        for each in self.store.grants() if self.store else ():
            found[each.key] += each.amount
        return found

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
        elif amount_of(step, args) is not None:
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
        for limit in self.limits:
            # The call that exhausts a budget may use more.
            over = TOKENS - 1 if isinstance(limit, TokenLimit) else 0
            for found, expected, most, key in self.counted(limit, thread):
                assert found == expected, limit.name
                assert found <= most + granted[key] + over, limit.name

    def counted(self, limit: Limit, thread: str) -> Iterator[tuple[int, int, Any, str]]:
        """What is counted for a limit, what ran, the limit's number, and the count's name."""
        numbers: dict[str, Any] = {"thread": limit.thread_limit, "run": limit.run_limit}
        numbers = {scope: number for scope, number in numbers.items() if number is not None}
        if self.store is None:
            used = usage(self.snapshot(thread))
            for scope, number in numbers.items():
                of_run = scope == "run"
                if isinstance(limit, TokenLimit):
                    found = (used.run_spent if of_run else used.spent).get(limit.counter, 0)
                elif isinstance(limit, ModelCallLimit):
                    found = used.run_model if of_run else used.model
                else:
                    found = (used.run_tools if of_run else used.tools).get(limit.counter, 0)
                ran = self.uses(limit)[thread, self.runs[thread] if of_run else None]
                yield found, ran, number, f"{limit.counter}/{scope}"
            return
        if limit.quotas:
            numbers["global"] = limit.quotas[0].limit
        uses = self.uses(limit)
        for scope, number in numbers.items():
            kept = [each for each in self.store.usages(f"{limit.counter}:{scope}:*") if each.used]
            expected = {
                "thread": [uses[each, None] for each in THREADS],
                "run": [uses[each, run] for each in THREADS for run in range(1, 99)],
                "global": [uses[None, None]],
            }[scope]
            found_all = sorted(kept, key=lambda each: each.used)
            ran_all = sorted(each for each in expected if each)
            for use, ran in zip(found_all, ran_all, strict=True):
                yield use.used, ran, number, use.key

    def uses(self, limit: Limit) -> Counter[tuple[str | None, int | None]]:
        """How much ran that a limit counts: in all, of each thread, and of each of its runs."""
        amount = TOKENS if isinstance(limit, TokenLimit) else 1
        found: Counter[tuple[str | None, int | None]] = Counter()
        for thread, run, call in self.ran.values():
            if limit.matches(call):
                for key in ((None, None), (thread, None), (thread, run)):
                    found[key] += amount
        return found


def offered_by(value: Any) -> dict[str, Any]:
    """What a question of ours offers, by limit; empty for one of a tool."""
    return value["action_requests"][0]["args"] if isinstance(value, dict) else {}


def amount_of(step: Step, args: Mapping[str, Any]) -> int | None:
    """The amount of an approval; `None` for what is offered, as for calls and tokens at once."""
    has_one_unit = len({name.startswith("tokens") for name in args}) == 1
    return step.amount if has_one_unit else None


def reply_to(step: Step, args: Mapping[str, Any]) -> Any:
    if step.reply == "unusable":
        return {"decisions": ["?"]}
    said: dict[str, Any] = {"type": step.reply}
    amount = amount_of(step, args)
    if step.reply == "approve" and amount is not None:
        said["amount"] = amount
    return {"decisions": [said]}


numbers = st.integers(0, 3)


@st.composite
def limits_of(draw: st.DrawFn, *, shared: bool) -> Limit:
    """A limit, which most often asks."""
    kind = draw(st.sampled_from(["search", "calc", "all", "model", "tokens"]))
    scopes = draw(st.sets(st.sampled_from(["run", "thread", *["quota"] * shared]), min_size=1))
    unit = TOKENS if kind == "tokens" else 1
    options: dict[str, Any] = {f"{each}_limit": unit * draw(numbers) for each in scopes - {"quota"}}
    if "quota" in scopes:
        options["quotas"] = [Quota(2 * unit * draw(numbers), per="global")]
    if draw(st.sampled_from([True, True, False])):
        grant = draw(st.none() | st.integers(1, 4))
        options |= {"exit_behavior": "ask", "grant": grant and grant * unit}
    elif kind not in {"model", "tokens"}:
        options["exit_behavior"] = draw(st.sampled_from(["continue", "end"]))
    options["name"] = f"{kind} {draw(st.integers(0, 10**6))}"
    try:
        if kind == "model":
            return ModelCallLimit(**options)
        if kind == "tokens":
            return TokenLimit(**options)
        return ToolCallLimit(None if kind == "all" else kind, **options)
    except ValueError:
        reject()


def stories_of(*, shared: bool) -> st.SearchStrategy[tuple[bool, list[Limit], list[Step]]]:
    """Whether a store counts, the limits, and what happens."""
    batches = st.lists(st.lists(st.sampled_from(TOOLS), min_size=1, max_size=4), max_size=3)
    replies = st.sampled_from(["approve"] * 7 + ["reject", "unusable", "nothing", "new run"])
    step = st.builds(
        Step, st.sampled_from(THREADS), batches, replies, st.none() | numbers, st.booleans()
    )
    limits = st.lists(limits_of(shared=shared), min_size=1, max_size=4)
    return st.tuples(st.just(shared), limits, st.lists(step, min_size=2, max_size=12))


ANOTHER_THREAD_HAS_MADE_ROOM: Any = (
    True,
    [ToolCallLimit("search", quotas=[Quota(0, per="global")], exit_behavior="ask", grant=4)],
    [
        Step("one", [["search"]], "nothing"),
        Step("two", [["search"]], "nothing"),
        Step("one", [], "approve"),
        Step("two", [], "unusable", twice=True),
    ],
)
A_GRANT_LETS_MORE_PAST_ANOTHER_LIMIT: Any = (
    [
        ToolCallLimit("search", run_limit=0, exit_behavior="ask", name="asks"),
        ToolCallLimit("search", thread_limit=2, run_limit=1, name="hard"),
    ],
    [Step("one", [["search", "search"]], "approve"), Step("one", [], "approve")],
)


@given(st.booleans().flatmap(lambda shared: stories_of(shared=shared)))
@example((False, *A_GRANT_LETS_MORE_PAST_ANOTHER_LIMIT))
@example((True, *A_GRANT_LETS_MORE_PAST_ANOTHER_LIMIT))
@example(ANOTHER_THREAD_HAS_MADE_ROOM)
@examples(120)
def test_random_answers(story: tuple[bool, list[Limit], list[Step]]) -> None:
    """Whatever is asked and answered, calls run, are counted and granted as the rules say."""
    shared, limits, played = story
    world = World(drawn.possible(limits), MemoryStore() if shared else None)

    async def play() -> None:
        for step in played:
            await world.play(step)
        for thread in THREADS:
            # Whatever waits comes to its end.
            while world.snapshot(thread).interrupts:
                await world.play(Step(thread, [], "reject"))
            if known := world.snapshot(thread).values:
                check_history(known["messages"])

    asyncio.run(play())
    world.scene.check_requests()

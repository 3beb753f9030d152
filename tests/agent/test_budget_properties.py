"""Random agents with random budgets: a plain model of the rules agrees with what is charged."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry.trace import NoOpTracerProvider
from prometheus_client import CollectorRegistry

from langchain_quota import (
    CostLimit,
    MemoryStore,
    Quota,
    QuotaMiddleware,
    Telemetry,
    TokenLimit,
    usage,
)
from langchain_quota.limits import Limit
from langchain_quota.model_usage import ModelUsage
from langchain_quota.testing import ScriptedChatModel
from tests.examples import examples
from tests.scene import CONFIG, recording

PER_TOKEN = 7
"""What a token costs, in microdollars."""

What = Literal["total", "input", "output", "money"]
NAMES: dict[What, str] = {
    "total": "model.total_tokens",
    "input": "model.input_tokens",
    "output": "model.output_tokens",
    "money": "model.microdollars",
}

numbers = st.integers(0, 200)
optional = st.none() | numbers


@dataclass(frozen=True, kw_only=True)
class Budget:
    """One budget; its numbers are tokens, and for money the price of as many.

    Attributes:
        name: Its name.
        what: What is counted.
        thread, run: What a thread and a run may use; `None` for no limit.
        quota: What all threads may use together; `None` for no quota.
        reserve: What is held before each call.
        bounds: Whether a function says it, when the call is about to be made.
        computed: Whether functions give the numbers.
        enforce: Whether calls are refused.
        keep: What is kept for a last call; `None` for no last call.
        near: The share from which it is near.
    """

    name: str
    what: What
    thread: int | None
    run: int | None
    quota: int | None
    reserve: int
    bounds: bool
    computed: bool
    enforce: bool
    keep: int | None
    near: float

    @property
    def unit(self) -> int:
        return PER_TOKEN if self.what == "money" else 1

    @property
    def numbers(self) -> list[int]:
        """What may be used, where that is something."""
        return [number for number in (self.thread, self.run, self.quota) if number]

    def rows(self, thread: str, *, shared: bool) -> dict[tuple[str, ...], int | None]:
        """The counts that a limit looks at, and how much of each may be used."""
        rows: dict[tuple[str, ...], int | None] = {
            (self.what, "thread", thread): self.thread,
            (self.what, "run"): self.run,
        }
        if shared and self.quota is not None:
            rows[self.what, "global"] = self.quota
        return rows

    def made(self, *, shared: bool) -> Limit:
        """The limit."""

        def amount(tokens: int | None) -> Any:
            money = self.what == "money" and tokens is not None
            return Decimal(tokens * PER_TOKEN) / 10**6 if money else tokens  # type: ignore[operator]

        def most(tokens: int | None) -> Any:
            return (lambda *_: amount(tokens)) if self.computed else amount(tokens)

        options: dict[str, Any] = {
            "thread_limit": None if self.thread is None else most(self.thread),
            "run_limit": None if self.run is None else most(self.run),
            "reserve": (lambda _: amount(self.reserve)) if self.bounds else amount(self.reserve),
            "name": self.name,
            "message": f"Out of {self.name}.",
            "enforce": self.enforce,
            "near": self.near,
        }
        if self.keep is not None:
            options |= {"exit_behavior": "finalize", "keep": amount(self.keep)}
        if shared and self.quota is not None:
            options["quotas"] = [Quota(amount(self.quota), per="global")]
        if self.what == "money":
            return CostLimit(**options)
        return TokenLimit(tokens=self.what, **options)


@st.composite
def budgets(draw: st.DrawFn, *, shared: bool) -> list[Budget]:
    """Some budgets, some of which count the same."""
    found: list[Budget] = []
    for index in range(draw(st.integers(1, 3))):
        thread, run, quota = draw(optional), draw(optional), draw(optional) if shared else None
        if thread is None and quota is None and run is None:
            run = draw(numbers)
        enforce = draw(st.booleans())
        keep = draw(st.none() | st.integers(1, 60)) if enforce else None
        what = draw(st.sampled_from([*NAMES]))
        # Of two whose numbers are known, none may always be reached before the other.
        computed = draw(st.booleans()) or any(each.what == what for each in found)
        budget = Budget(
            name=f"budget-{index}",
            what=what,
            thread=thread,
            run=run,
            quota=quota,
            reserve=draw(st.integers(1, 40)),
            bounds=draw(st.booleans()),
            computed=computed,
            enforce=enforce,
            keep=keep,
            near=draw(st.sampled_from([0.5, 0.8, 1])),
        )
        found.append(budget)
    return _admitting(found)


def _admitting(budgets: list[Budget]) -> list[Budget]:
    """The budgets, with reserves and last calls that limits can have."""
    found = []
    for each in budgets:
        least = min(each.numbers, default=40)
        reserve = each.reserve if each.bounds else min(each.reserve, least)
        keep = None if each.keep is None else max(each.keep, 1 if each.bounds else reserve)
        if keep is not None and keep >= least:
            keep = None
        found.append(replace(each, reserve=reserve, keep=keep))
    return found


Size = tuple[int, int]
"""The tokens of input and of output that a call uses."""


def used_by(size: Size) -> dict[str, int]:
    return {"input": size[0], "output": size[1], "total": sum(size), "money": sum(size)}


@dataclass
class Reference:
    """What the rules say of some runs.

    Attributes:
        budgets: The budgets.
        shared: Whether a store keeps the counts.
        counts: What is used, by what a budget looks at.
        near, exhausted: How often a budget has come so far, by its name and its scope.
        notes: What is left of each budget at each call, if one is near.
        ends: How each run ends: by the names of the budgets that refuse, or by none.
    """

    budgets: Sequence[Budget]
    shared: bool
    counts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    near: Counter[tuple[str, str]] = field(default_factory=Counter)
    exhausted: Counter[tuple[str, str]] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    ends: list[list[str]] = field(default_factory=list)

    def run(self, thread: str, sizes: Sequence[Size]) -> None:
        """A run that makes as many calls as it may."""
        for key in [key for key in self.counts if key[1:] == ("run",)]:
            del self.counts[key]
        for size in sizes:
            refusing = self.refusing(thread, bounded=False)
            is_last = not refusing and self.is_last(thread)
            refusing = refusing or self.refusing(thread, bounded=True)
            if refusing:
                self.ends.append(refusing)
                return
            self.notes.append("last" if is_last else self.note(thread))
            self.charge(thread, size)
            if is_last:
                break
        self.ends.append([])

    def refusing(self, thread: str, *, bounded: bool) -> list[str]:
        """The budgets with too little left for what is held: at first, or by reserves."""
        return [
            each.name
            for each in self.budgets
            if each.enforce
            and any(
                most is not None
                and self.counts[row] + (each.reserve * each.unit if bounded else 1)
                > most * each.unit
                for row, most in each.rows(thread, shared=self.shared).items()
            )
        ]

    def is_last(self, thread: str) -> bool:
        """Whether no more is left of a budget than it keeps for a last call."""
        return any(
            each.keep is not None
            and most is not None
            and most * each.unit - self.counts[row] <= each.keep * each.unit
            for each in self.budgets
            for row, most in each.rows(thread, shared=self.shared).items()
        )

    def charge(self, thread: str, size: Size) -> None:
        """Charge a call, and see how far the budgets have come."""
        before, used = self.counts.copy(), used_by(size)
        rows = {row for each in self.budgets for row in each.rows(thread, shared=self.shared)}
        for row in rows:
            self.counts[row] += used[row[0]] * (PER_TOKEN if row[0] == "money" else 1)
        for each in self.budgets:
            for row, most in each.rows(thread, shared=self.shared).items():
                if most is None or not each.enforce:
                    continue
                full = most * each.unit
                share = Fraction(str(each.near)) * full
                if before[row] < full <= self.counts[row]:
                    self.exhausted[each.name, row[1]] += 1
                elif before[row] < share <= self.counts[row]:
                    self.near[each.name, row[1]] += 1

    def note(self, thread: str) -> str:
        """What the model is told: the least that is left of each budget, once one is near."""
        parts, is_near = [], False
        for each in self.budgets:
            left = []
            for row, most in each.rows(thread, shared=self.shared).items():
                if most is not None and each.enforce:
                    full = most * each.unit
                    left.append((full - self.counts[row], full))
                    is_near |= self.counts[row] >= Fraction(str(each.near)) * full
            if left:
                parts.append(_shown(each.what, *min(left, key=lambda pair: pair[0])))
        return "; ".join(parts) if is_near else ""


def _shown(what: What, left: int, most: int) -> str:
    """What is left, in words; dollars with two decimals at least."""
    if what != "money":
        subject = "tokens" if what == "total" else f"{what} tokens"
        return f"{subject}: {left} of {most} left"

    def dollars(amount: int) -> str:
        whole, _, rest = f"{Decimal(amount) / 10**6:.6f}".partition(".")
        return f"${whole}.{rest[:2]}{rest[2:].rstrip('0')}"

    return f"money: {dollars(left)} of {dollars(most)} left"


def answer(size: Size, *, goes_on: bool) -> AIMessage:
    used: Any = {"input_tokens": size[0], "output_tokens": size[1], "total_tokens": sum(size)}
    calls = [{"name": "search", "args": {}, "id": "call"}] if goes_on else []
    return AIMessage("Hello.", usage_metadata=used, tool_calls=calls)


def dollars_of(used: ModelUsage) -> Decimal:
    return Decimal(used.total_tokens * PER_TOKEN) / 10**6


def told(text: str) -> str:
    """What a request tells the model of its budgets."""
    if "last model call" in text:
        return "last"
    return text.partition("Budget: ")[2].removesuffix(".")


sizes = st.tuples(st.integers(0, 40), st.integers(1, 20))
runs = st.tuples(st.sampled_from(["1", "2"]), st.lists(sizes, min_size=1, max_size=5))


@given(shared=st.booleans(), data=st.data(), all_runs=st.lists(runs, min_size=1, max_size=4))
@examples(80)
def test_random_agents(
    *, shared: bool, data: st.DataObject, all_runs: list[tuple[str, list[Size]]]
) -> None:
    """Whatever the budgets and answers, calls are made, charged and shown as the rules say."""
    drawn: list[Budget] = data.draw(budgets(shared=shared))
    expected = Reference(drawn, shared)
    registry, store = CollectorRegistry(), MemoryStore() if shared else None
    quota: QuotaMiddleware[Any, Any] = QuotaMiddleware(
        [each.made(shared=shared) for each in drawn],
        prices=dollars_of if any(each.what == "money" for each in drawn) else None,
        store=store,
        tell_model=True,
        telemetry=Telemetry(registry=registry, tracer_provider=NoOpTracerProvider()),
    )
    played: list[AIMessage] = []
    model = ScriptedChatModel(script=lambda _: played.pop(0))
    agent: Any = create_agent(
        model, [recording("search", [])], middleware=[quota], checkpointer=InMemorySaver()
    )

    for thread, each in all_runs:
        played[:] = [answer(size, goes_on=index + 1 < len(each)) for index, size in enumerate(each)]
        config = {"configurable": {"thread_id": thread}}
        result = agent.invoke({"messages": [("user", "Hi!")]}, config)
        expected.run(thread, each)

        refusing = expected.ends[-1]
        if refusing:
            ending = " ".join(f"Out of {name}." for name in refusing)
            assert result["messages"][-1].text == ending
        used = usage(agent.get_state(config))
        for what, name in NAMES.items():
            if any(budget.what == what for budget in drawn):
                assert used.spent.get(name, 0) == expected.counts[what, "thread", thread]
                assert used.run_spent.get(name, 0) == expected.counts[what, "run"]

    assert [told(call.messages[-1].text) for call in model.calls] == expected.notes
    for metric, counts in (("near_limit", expected.near), ("exhausted", expected.exhausted)):
        for budget in drawn:
            for scope in ("thread", "run", "global"):
                labels = {"agent": "unnamed", "limit": budget.name, "scope": scope}
                found = registry.get_sample_value(f"langchain_quota_{metric}_total", labels)
                assert (found or 0) == counts[budget.name, scope], (metric, labels)
    if store is not None:
        for what, name in NAMES.items():
            (kept,) = store.peek([f"{name}:global:"])
            assert (0 if kept is None else kept.used) == expected.counts[what, "global"]


@given(
    limit=st.integers(1, 200),
    given=st.integers(1, 30),
    longest=st.integers(1, 60),
    calls=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    shared=st.booleans(),
)
@examples(40)
def test_random_calls_are_made_if_their_bound_fits(
    limit: int, given: int, longest: int, calls: list[int], *, shared: bool
) -> None:
    """Whatever is left, a call is made as it is if its bound fits, and else refused."""

    def bound(request: Any) -> ModelUsage:
        total = given + longest
        return ModelUsage(input_tokens=given, output_tokens=longest, total_tokens=total)

    asked: list[object] = []

    class Settings(AgentMiddleware):
        """Notes the settings of the calls that are made."""

        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            asked.append(request.model_settings)
            return handler(request)

    store = MemoryStore() if shared else None
    quota: QuotaMiddleware[Any, Any] = QuotaMiddleware(
        [TokenLimit(thread_limit=limit, reserve=bound)],
        store=store,
        telemetry=Telemetry(registry=CollectorRegistry(), tracer_provider=NoOpTracerProvider()),
    )
    wished = iter(calls)
    model = ScriptedChatModel(
        script=lambda _: answer((given, min(next(wished), longest)), goes_on=False)
    )
    agent: Any = create_agent(model, middleware=[quota, Settings()], checkpointer=InMemorySaver())
    expected = used = 0
    for wish in calls:
        agent.invoke({"messages": [("user", "Hi!")]}, CONFIG)
        if used + given + longest > limit:
            break
        expected += 1
        used += given + min(wish, longest)

    assert asked == [{}] * expected
    assert usage(agent.get_state(CONFIG)).spent.get(NAMES["total"], 0) == used <= limit

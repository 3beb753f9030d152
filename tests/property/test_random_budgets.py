"""Random agents with random budgets: a plain model of the rules agrees with what is charged."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

from hypothesis import given
from hypothesis import strategies as st

from langchain_quota import CostLimit, MemoryStore, Quota, TokenLimit
from langchain_quota.limits import Limit
from tests.examples import examples
from tests.scene import Form, Kind, Scene
from tests.telemetry import HAS_INLINE, telling
from tests.tokens import answer

PER_TOKEN = 7
"""What a token costs, in nanodollars."""

What = Literal["total", "input", "output", "money"]
NAMES: dict[What, str] = {
    "total": "model.total_tokens",
    "input": "model.input_tokens",
    "output": "model.output_tokens",
    "money": "model.nanodollars",
}
WAYS: list[tuple[Kind, Form]] = [("quota", "sync"), ("quota", "async")]
WAYS += [("graph", "async"), ("inline", "sync"), ("inline", "async")] if HAS_INLINE else []
Row = tuple[str, ...]
"""A count that a budget looks at."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """One budget; its numbers are tokens, and for money the price of as many.

    It has its limits by scope. If it `bounds`, a function says what is held before a call; if they
    are `computed`, functions give the numbers.
    """

    name: str
    what: What
    most: dict[str, int]
    reserve: int
    bounds: bool
    computed: bool
    enforce: bool
    keep: int | None
    near: float

    @property
    def unit(self) -> int:
        return PER_TOKEN if self.what == "money" else 1

    def rows(self, thread: str) -> Iterator[tuple[Row, int]]:
        """The counts that it limits, and how much of each may be used."""
        for scope, most in self.most.items():
            yield (self.what, scope, thread if scope == "thread" else ""), most * self.unit

    def made(self) -> Limit:
        """The limit."""

        def amount(tokens: int) -> Any:
            return Decimal(tokens * PER_TOKEN) / 10**9 if self.what == "money" else tokens

        options: dict[str, Any] = {
            f"{scope}_limit": (lambda *_, most=most: amount(most))
            if self.computed
            else amount(most)
            for scope, most in self.most.items()
            if scope != "global"
        }
        if "global" in self.most:
            options["quotas"] = [Quota(amount(self.most["global"]), per="global")]
        options["reserve"] = (
            (lambda _: amount(self.reserve)) if self.bounds else amount(self.reserve)
        )
        if self.keep is not None:
            options |= {"exit_behavior": "finalize", "keep": amount(self.keep)}
        options |= {"name": self.name, "enforce": self.enforce, "near": self.near}
        options["message"] = f"Out of {self.name}."
        if self.what == "money":
            return CostLimit(**options)
        return TokenLimit(tokens=self.what, **options)


@st.composite
def budgets(draw: st.DrawFn, *, shared: bool) -> list[Budget]:
    """Some budgets that limits can have, some of which count the same."""
    found: list[Budget] = []
    for index in range(draw(st.integers(1, 3))):
        scopes = ["thread", "run", *(["global"] if shared else [])]
        limited = draw(st.sets(st.sampled_from(scopes), min_size=1))
        most = {scope: draw(st.integers(0, 200)) for scope in scopes if scope in limited}
        least = min(filter(None, most.values()), default=40)
        bounds, enforce = draw(st.booleans()), draw(st.booleans())
        reserve = draw(st.integers(1, 40 if bounds else min(40, least)))
        keep = draw(st.none() | st.integers(1 if bounds else reserve, 60)) if enforce else None
        what = draw(st.sampled_from([*NAMES]))
        found.append(
            Budget(
                name=f"budget-{index}",
                what=what,
                most=most,
                reserve=reserve,
                bounds=bounds,
                # Of two whose numbers are known, none may always be reached before the other.
                computed=draw(st.booleans()) or any(each.what == what for each in found),
                enforce=enforce,
                keep=keep if keep is None or keep < least else None,
                near=draw(st.sampled_from([0.5, 0.8, 1])),
            )
        )
    return found


Size = tuple[int, int]
"""The tokens of input and of output that a call uses."""


@dataclass
class Reference:
    """What the rules say of some runs: counts, thresholds, notes to the model, ends."""

    budgets: Sequence[Budget]
    counts: Counter[Row] = field(default_factory=Counter)
    near: Counter[Row] = field(default_factory=Counter)
    exhausted: Counter[Row] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)

    def run(self, thread: str, sizes: Sequence[Size]) -> None:
        """A run that makes as many calls as it may."""
        for key in [key for key in self.counts if key[1] == "run"]:
            del self.counts[key]
        for size in sizes:
            self.end = self.refusing(thread, bounded=False)
            is_last = not self.end and self.is_last(thread)
            self.end = self.end or self.refusing(thread, bounded=True)
            if self.end:
                return
            self.notes.append("last" if is_last else self.note(thread))
            self.charge(thread, size)
            if is_last:
                return

    def refusing(self, thread: str, *, bounded: bool) -> list[str]:
        """The budgets with too little left for what is held: at first, or by reserves."""
        return [
            each.name
            for each in self.budgets
            if each.enforce
            and any(
                self.counts[row] + (each.reserve * each.unit if bounded else 1) > most
                for row, most in each.rows(thread)
            )
        ]

    def is_last(self, thread: str) -> bool:
        """Whether no more is left of a budget than it keeps for a last call."""
        return any(
            each.keep is not None and most - self.counts[row] <= each.keep * each.unit
            for each in self.budgets
            for row, most in each.rows(thread)
        )

    def charge(self, thread: str, size: Size) -> None:
        """Charge a call, and see how far the budgets have come."""
        before = self.counts.copy()
        used = {"input": size[0], "output": size[1], "total": sum(size)}
        used["money"] = sum(size) * PER_TOKEN
        for what in NAMES:
            for scope in (("thread", thread), ("run", ""), ("global", "")):
                self.counts[what, *scope] += used[what]
        for each in self.budgets:
            for row, most in each.rows(thread) if each.enforce else ():
                if before[row] < most <= self.counts[row]:
                    self.exhausted[each.name, row[1]] += 1
                elif before[row] < Fraction(str(each.near)) * most <= self.counts[row]:
                    self.near[each.name, row[1]] += 1

    def note(self, thread: str) -> str:
        """What the model is told: the least that is left of each budget, once one is near."""
        parts, is_near = [], False
        for each in self.budgets:
            left = [(most - self.counts[row], most) for row, most in each.rows(thread)]
            if each.enforce:
                parts.append(_shown(each.what, *min(left, key=lambda pair: pair[0])))
                is_near |= any(
                    most - over >= Fraction(str(each.near)) * most for over, most in left
                )
        return "; ".join(parts) if is_near else ""


def _shown(what: What, left: int, most: int) -> str:
    """What is left, in words; dollars with two decimals at least."""
    if what != "money":
        subject = "tokens" if what == "total" else f"{what} tokens"
        return f"{subject}: {left} of {most} left"

    def dollars(amount: int) -> str:
        whole, _, rest = f"{Decimal(amount) / 10**9:.9f}".partition(".")
        return f"${whole}.{rest[:2]}{rest[2:].rstrip('0')}"

    return f"money: {dollars(left)} of {dollars(most)} left"


def told(text: str) -> str:
    """What a request tells the model of its budgets."""
    if "last model call" in text:
        return "last"
    return text.partition("Budget: ")[2].removesuffix(".")


sizes = st.tuples(st.integers(0, 40), st.integers(1, 20))
runs = st.tuples(st.sampled_from(["1", "2"]), st.lists(sizes, min_size=1, max_size=5))


@given(
    shared=st.booleans(),
    data=st.data(),
    way=st.sampled_from(WAYS),
    all_runs=st.lists(runs, min_size=1, max_size=4),
)
@examples(80)
async def test_random_agents(
    *, shared: bool, data: st.DataObject, way: Any, all_runs: list[tuple[str, list[Size]]]
) -> None:
    """Whatever the budgets and answers, calls are made, charged and shown as the rules say."""
    drawn: list[Budget] = data.draw(budgets(shared=shared))
    expected, played = Reference(drawn), list[Any]()
    signals = telling()
    store = MemoryStore() if shared else None
    kind, form = way
    options: dict[str, Any] = {"kind": kind, "form": form, "store": store, "tell_model": True}
    if any(each.what == "money" for each in drawn):
        options["prices"] = lambda used: Decimal(used.total_tokens * PER_TOKEN) / 10**9
    limits = [each.made() for each in drawn]
    scene = Scene(signals, lambda _: played.pop(0), limits, **options)
    for thread, each in all_runs:
        goes_on = ["search"] * (len(each) - 1)
        calls = [*([name] for name in goes_on), []]
        played[:] = [
            answer(sum(size), *called, input_tokens=size[0], output_tokens=size[1])
            for size, called in zip(each, calls, strict=True)
        ]
        result = await scene.play(thread_id=thread)
        expected.run(thread, each)
        if expected.end:
            ending = " ".join(f"Out of {name}." for name in expected.end)
            assert result["messages"][-1].text == ending
        # A graph has no state of ours: that its counts hold, its calls and notes show.
        used = scene.usage()
        for what in {budget.what for budget in drawn} if kind != "graph" else ():
            assert used.spent.get(NAMES[what], 0) == expected.counts[what, "thread", thread]
            assert used.run_spent.get(NAMES[what], 0) == expected.counts[what, "run", ""]
    assert [told(call.messages[-1].text) for call in scene.model.calls] == expected.notes
    for level, counted in (("near", expected.near), ("exhausted", expected.exhausted)):
        for budget in drawn:
            for scope in ("thread", "run", "global"):
                labels = {"agent": "unnamed", "limit": budget.name, "scope": scope, "level": level}
                found = signals.value("langchain_quota_crossings_total", **labels) or 0
                assert found == counted[budget.name, scope], labels
    for what in {each.what for each in drawn if store is not None and "global" in each.most}:
        (kept,) = store.peek([f"{NAMES[what]}:global:"])  # type: ignore[union-attr]
        assert (0 if kept is None else kept.used) == expected.counts[what, "global", ""]

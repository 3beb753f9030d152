"""Random agents whose decisions are logged, and checked again: against the log and the truth."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from io import StringIO
from logging import StreamHandler
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage

from langchain_quota import (
    CostLimit,
    MemoryStore,
    ModelCallLimit,
    Quota,
    TokenLimit,
    ToolCallLimit,
    log_decisions,
)
from langchain_quota.cli.replay import LogContents, Replay, Verdict, logged
from langchain_quota.limits import Limit
from tests import drawn
from tests.examples import DEPTH
from tests.scene import Form, Kind, Scene
from tests.stores import Clock, FickleStore
from tests.telemetry import HAS_INLINE, telling

Lines = list[dict[str, Any]]
TOOLS = ("search", "calc")
KINDS: list[Kind] = ["quota", "quota", "graph"]
KINDS += ["inline"] if HAS_INLINE else []


@dataclass(frozen=True)
class Run:
    """A run on a thread: a batch and the tokens of each answer, and what happens before."""

    thread: str
    user: str
    answers: list[tuple[drawn.Batch | None, int, int]]
    passes: float = 0
    down: bool = False
    resets: bool = False


tokens = st.integers(1, 40)
"""Not 0: then they are estimated from messages, which refusals change."""
runs = st.lists(
    st.builds(
        Run,
        thread=st.sampled_from(["one", "two"]),
        user=st.sampled_from(["ann", "bob"]),
        answers=st.lists(st.tuples(drawn.answers(*TOOLS), tokens, tokens), min_size=1, max_size=4),
        passes=st.sampled_from([0, 0, 25, 61]),
        down=st.sampled_from([False, False, False, True]),
        resets=st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=4,
)


@st.composite
def budgets(draw: st.DrawFn, *, stored: bool) -> list[Limit]:
    """Some budgets, of tokens and of money, with all that budgets can have."""
    limits: list[Limit] = []
    for index in range(draw(st.integers(0, 2))):
        most, enforce = draw(st.integers(20, 150)), draw(st.sampled_from([True, True, False]))
        exits = ["end", "error", *(["finalize"] if enforce else [])]
        options: dict[str, Any] = {
            "name": f"budget-{index}",
            "run_limit": most,
            "thread_limit": draw(st.sampled_from([None, 2 * most])),
            "quotas": [Quota(most, per="user_id", window=drawn.WINDOW)] * stored,
            "enforce": enforce,
            "reserve": draw(st.sampled_from([None, None, 10])),
            "exit_behavior": draw(st.sampled_from(exits)),
        }
        options["keep"] = 15 if options["exit_behavior"] == "finalize" else None
        priced = draw(st.sampled_from([{}, {"search": 7}]))
        tokens = draw(st.booleans())
        limits.append(TokenLimit(**options) if tokens else CostLimit(tool_prices=priced, **options))
    return limits


def price(used: Any) -> Decimal:
    return Decimal(used.total_tokens)


class Agent:
    """An agent under limits, whose script does not depend on what they refuse."""

    def __init__(self, limits: Sequence[Limit], kind: Kind, form: Form, *, stored: bool) -> None:
        self.written, self.clock = StringIO(), Clock()
        self.store = FickleStore(MemoryStore(clock=self.clock))
        log = log_decisions(StreamHandler(self.written))
        options: dict[str, Any] = {"kind": kind, "form": form, "on_decision": log}
        if stored:
            options["store"] = self.store
        if any(isinstance(limit, CostLimit) for limit in limits):
            options["prices"] = price
        self.queue = list[Any]()
        self.scene = Scene(
            telling(spans="off"), self.answer, limits, tools=TOOLS, name="agent", **options
        )

    def answer(self, _: Sequence[BaseMessage]) -> Any:
        batch, of_input, of_output = self.queue.pop(0) if self.queue else ([], 1, 1)
        if batch is None:
            return drawn.ProviderError("overloaded")
        calls = [
            {"name": each, "args": {}, "id": f"{len(self.scene.model.calls)}-{index}"}
            if isinstance(each, str)
            # Calls share an id in one message only: one of an earlier message is checked twice.
            else {**each, "id": each["id"] and f"{len(self.scene.model.calls)}-{each['id']}"}
            for index, each in enumerate(batch)
        ]
        used: Any = {"input_tokens": of_input, "output_tokens": of_output}
        used["total_tokens"] = of_input + of_output
        return AIMessage("" if calls else "done", tool_calls=calls, usage_metadata=used)

    async def play(self, planned: Sequence[Run]) -> Lines:
        """Play the runs, and return what the log has of them."""
        for run in planned:
            self.queue[:] = run.answers
            self.clock.now += run.passes
            if run.resets:
                self.store.reset([usage.key for usage in self.store.usages()])
            self.store.down = run.down
            with suppress(*drawn.RAISED):
                await self.scene.play(thread_id=run.thread, context={"user_id": run.user})
            self.store.down = False
        return [json.loads(line) for line in self.written.getvalue().splitlines()]


def replayed(limits: Sequence[Limit], lines: Lines) -> list[list[Verdict]]:
    """What a replay decides of each line that its runs come to."""
    contents = LogContents(lines)
    lacking = {limit.name: contents.lacks(limit) for limit in limits}
    # There may be no call that a limit could refuse.
    assert all(reason.startswith("the log has no ") for reason in lacking.values() if reason)
    known = [limit for limit in limits if not lacking[limit.name]]
    return [verdicts for verdicts in _replay(known, contents, lines) if verdicts[0][0] is not None]


def _replay(limits: Sequence[Limit], contents: LogContents, lines: Lines) -> Iterator[Any]:
    replay = Replay(limits, contents)
    for line in lines:
        if "calls" in line:
            yield replay.check(line)
        else:
            replay.charge(line)


def in_log(lines: Lines) -> list[list[Verdict]]:
    """The decisions of a log, by line."""
    return [[logged(call) for call in line["calls"]] for line in lines if "calls" in line]


@pytest.mark.timeout(3600)
@settings(max_examples=24 if DEPTH == "quick" else 1000)
@given(data=st.data(), kind=st.sampled_from(KINDS), form=st.sampled_from(["sync", "async"]))
def test_random_agents(data: st.DataObject, kind: Kind, form: Form) -> None:
    """Under its own limits a log gives itself, even over resets and outages of the store.

    The log of an agent that nothing stops gives, under limits, what the agent does under them.
    """
    stored = kind == "graph" or data.draw(st.booleans())
    limits = [*data.draw(drawn.limit_lists(stored=stored)), *data.draw(budgets(stored=stored))]
    # Every kind of call is logged.
    limits += [ToolCallLimit(name="tools", enforce=False), ModelCallLimit(enforce=False)]

    def play(limits: Sequence[Limit], planned: Sequence[Run]) -> Lines:
        return asyncio.run(Agent(limits, kind, form, stored=stored).play(planned))

    planned = data.draw(runs)
    lines = play(limits, planned)
    assert replayed(limits, lines) == in_log(lines)

    # A refund of a call that only the log has charged is one of the replay, too: without a store,
    # the inline middleware does not save the count of a call that fails.
    fails = kind != "inline" or stored
    calm = [
        replace(run, down=False, resets=False, answers=[a for a in run.answers if a[0] or fails])
        for run in planned
    ]
    meters: list[Limit] = [free(limit) for limit in limits]
    if data.draw(st.booleans()) and not any(getattr(limit, "reserve", None) for limit in limits):
        # The log does not have the limits' own counts.
        quotas = [Quota(9**9, per="user_id")] * stored
        meters = [TokenLimit(enforce=False), CostLimit(enforce=False)]
        meters += [ToolCallLimit("all", quotas=quotas, enforce=False)]
        meters += [ModelCallLimit(quotas=quotas, enforce=False)]
    assert replayed(limits, play(meters, calm)) == in_log(play(limits, calm))


def free(limit: Limit) -> Limit:
    """The same limit as a dry run."""
    ends = {"exit_behavior": "end", "keep": None} if limit.exit_behavior == "finalize" else {}
    gives_up = {"give_up_after": None} if limit.give_up_after else {}
    changes: dict[str, Any] = {"enforce": False, **gives_up, **ends}
    if not isinstance(limit, TokenLimit | CostLimit):
        changes.pop("keep", None)
    return replace(limit, **changes)


async def test_limits_that_share_a_count() -> None:
    """The log has a thread's count, although a second limit over it has no number for threads."""
    limits = [ToolCallLimit(thread_limit=1), ToolCallLimit(name="meter", enforce=False)]
    planned = [Run("one", "ann", [(["search"], 1, 1)], resets=resets) for resets in (False, True)]
    lines = await Agent(limits, "graph", "async", stored=True).play(planned)
    assert replayed(limits, lines) == in_log(lines)

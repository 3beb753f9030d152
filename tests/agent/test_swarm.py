"""In a swarm: limits stop agents that hand over to each other, and every history stays valid."""

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    ModelCallLimitMiddleware,
    Quota,
    QuotaMiddleware,
    QuotaWarning,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import Script, ScriptedChatModel, Turn
from tests.agent.rules import CONFIG, Middleware, check_history, recording
from tests.signals import Signals

# Among the oldest versions there is none.
langgraph_swarm = pytest.importorskip("langgraph_swarm")

TO_ALICE, TO_BOB = "transfer_to_alice", "transfer_to_bob"
PING_PONG: tuple[Script, Script] = (lambda _: [TO_BOB], lambda _: [TO_ALICE])
STEPS = {"recursion_limit": 60}
THREAD = [ModelCallLimit(run_limit=3, thread_limit=6)]
THREAD_ID = '{"configurable": {"thread_id": …}}'
STOP = ModelCallLimit(thread_limit=9, name="stop")
"""Ends what no other limit ends."""


class Swarm:
    """Alice and Bob, who can search and hand over to each other.

    Args:
        scripts: What the models of Alice and Bob play.
        middleware: Those of both agents.
        per_agent: Whether each agent keeps a state of its own.
        checkpointer: That of the swarm.
    """

    def __init__(
        self,
        scripts: tuple[Script, Script],
        *middleware: Middleware,
        per_agent: bool = False,
        checkpointer: InMemorySaver | None = None,
    ) -> None:
        self.ran: list[str] = []
        self.alice, self.bob = (ScriptedChatModel(script=script) for script in scripts)
        agents = [
            create_agent(
                model,
                [
                    langgraph_swarm.create_handoff_tool(agent_name=other),
                    recording("search", self.ran),
                ],
                middleware=middleware,
                name=name,
                checkpointer=per_agent or None,
            )
            for name, other, model in (("alice", "bob", self.alice), ("bob", "alice", self.bob))
        ]
        self.graph: Any = langgraph_swarm.create_swarm(
            agents, default_active_agent="alice"
        ).compile(checkpointer=checkpointer)

    async def turn(self, config: Any = CONFIG) -> Any:
        """A new run of the swarm."""
        return await self.graph.ainvoke({"messages": [("user", "Go!")]}, {**config, **STEPS})

    def kept(self) -> Any:
        """The history that the checkpointer keeps."""
        return self.graph.get_state(CONFIG).values["messages"]

    def calls(self) -> list[int]:
        """How many model calls each agent has made."""
        return [len(self.alice.calls), len(self.bob.calls)]

    def check_requests(self) -> None:
        """Assert that whatever a model was sent is valid."""
        for call in (*self.alice.calls, *self.bob.calls):
            check_history(call.messages)


def swarm(
    signals: Signals, scripts: tuple[Script, Script], limits: Sequence[Limit], **options: Any
) -> Swarm:
    """A swarm with a checkpointer, under limits that a store counts."""
    quota: Any = QuotaMiddleware(limits, store=MemoryStore(), telemetry=signals.telemetry)
    return Swarm(scripts, quota, checkpointer=InMemorySaver(), **options)


# Ping-pong: every hand-off begins a new run of an agent.


async def test_ping_pong_stops_at_a_threads_limit(signals: Signals) -> None:
    """With a store, agents that hand over for ever make as many calls as the thread may."""
    there = swarm(signals, PING_PONG, THREAD)

    result = await there.turn()

    assert there.calls() == [3, 3]
    assert result["messages"][-1].text.startswith("Model call limits exceeded: thread limit")
    check_history(there.kept())
    there.check_requests()


async def test_ping_pong_stops_at_a_limit_of_hand_offs(signals: Signals) -> None:
    """A limit on the hand-off tools themselves stops them, and lets everything else go on."""
    handoffs = ToolCallLimit([TO_ALICE, TO_BOB], thread_limit=3, name="handoffs")

    def answer(messages: Sequence[BaseMessage]) -> Turn:
        is_refused = str(messages[-1].content).startswith("Tool call limit exceeded")
        return "I answer it myself." if is_refused else [TO_ALICE]

    there = swarm(signals, (PING_PONG[0], answer), [handoffs])

    result = await there.turn()

    assert there.calls() == [2, 3]
    assert result["messages"][-1].text == "I answer it myself."
    check_history(there.kept())
    there.check_requests()


async def test_without_a_store_nothing_stops_them(signals: Signals) -> None:
    """Without a store every hand-off begins a new budget, for threads, too; a warning says so."""
    quota: Any = QuotaMiddleware(THREAD, telemetry=signals.telemetry)
    there = Swarm(PING_PONG, quota, checkpointer=InMemorySaver())

    with (
        pytest.warns(QuotaWarning, match="the limit holds within one run only"),
        pytest.raises(GraphRecursionError),
    ):
        await there.turn()

    assert sum(there.calls()) > 6


async def test_ping_pong_stops_at_a_limit_of_the_root_run(signals: Signals) -> None:
    """A quota of the root run holds all agents together, and begins anew with the next question."""
    limit = ModelCallLimit(quotas=[Quota(6, per="root_run")])
    quota: Any = QuotaMiddleware([limit], store=MemoryStore(), telemetry=signals.telemetry)
    there = Swarm(PING_PONG, quota, checkpointer=InMemorySaver())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await there.turn()
        assert there.calls() == [3, 3]
        await there.turn()

    assert sum(there.calls()) == 12
    check_history(there.kept())
    there.check_requests()


async def test_a_quota_of_the_root_run_needs_no_thread(signals: Signals) -> None:
    """As the warning says: without a thread id, too, and without a warning."""
    limit = ModelCallLimit(quotas=[Quota(6, per="root_run")])
    quota: Any = QuotaMiddleware([limit], store=MemoryStore(), telemetry=signals.telemetry)
    there = Swarm(PING_PONG, quota)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await there.turn({})

    assert there.calls() == [3, 3]


# What the warning says, and that its remedies work.

COUNT_TOGETHER = (
    "store=MemoryStore() or RedisStore(), and call the outermost graph with " + THREAD_ID
)
COUNT_ALONE = "give create_agent checkpointer=True, and the outermost graph a checkpointer"


@pytest.mark.parametrize("is_drop_in", [False, True], ids=["quota", "drop-in"])
async def test_the_warning_without_a_store(signals: Signals, *, is_drop_in: bool) -> None:
    """It names a store with a thread id, and a state per agent; the drop-ins take no store."""
    middleware = plain(signals, is_drop_in=is_drop_in)
    there = Swarm((["done"], []), middleware, checkpointer=InMemorySaver())

    with pytest.warns(QuotaWarning) as caught:
        await there.turn()

    [text] = [str(each.message) for each in caught]
    user = "use QuotaMiddleware with" if is_drop_in else "give the middleware"
    assert f"together, {user} {COUNT_TOGETHER}; " in text
    assert 'Quota(…, per="root_run")' in text
    assert text.endswith(COUNT_ALONE)


async def test_the_warning_without_a_thread(signals: Signals) -> None:
    """A store that has no thread to count by needs the outermost run's thread id."""
    quota: Any = QuotaMiddleware(THREAD, store=MemoryStore(), telemetry=signals.telemetry)
    there = Swarm((["done", "done"], []), quota)

    with pytest.warns(QuotaWarning) as caught:
        await there.turn({})

    [text] = [str(each.message) for each in caught]
    assert f"Call the outermost graph with {THREAD_ID}: the store counts by it" in text


async def test_a_store_counts_agents_together_without_a_checkpointer(signals: Signals) -> None:
    """As the warning says: a store and a thread id hold both agents to one number, for all runs."""
    quota: Any = QuotaMiddleware(THREAD, store=MemoryStore(), telemetry=signals.telemetry)
    there = Swarm(PING_PONG, quota)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await there.turn()
        await there.turn()

    assert there.calls() == [3, 3]


@pytest.mark.parametrize("is_drop_in", [False, True], ids=["quota", "drop-in"])
async def test_a_state_per_agent_counts_its_calls_alone(
    signals: Signals, *, is_drop_in: bool
) -> None:
    """As the warning says: with `checkpointer=True` each agent is held to the number."""
    middleware = plain(signals, is_drop_in=is_drop_in)
    there = Swarm(PING_PONG, middleware, per_agent=True, checkpointer=InMemorySaver())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await there.turn()
        await there.turn()

    assert there.calls() == [6, 6]
    check_history(there.kept())
    there.check_requests()


def plain(signals: Signals, *, is_drop_in: bool) -> Any:
    """A middleware without a store, under a thread limit."""
    if is_drop_in:
        return ModelCallLimitMiddleware(thread_limit=6, telemetry=signals.telemetry)
    return QuotaMiddleware(THREAD, telemetry=signals.telemetry)


# Histories.

BATCHES: dict[str, tuple[Script, Script]] = {
    "a hand-off beside a search": (
        lambda _: [TO_BOB, "search"],
        lambda _: ["search", TO_ALICE],
    ),
    "two hand-offs": (lambda _: [TO_BOB, TO_BOB], lambda _: [TO_ALICE, TO_ALICE]),
    "searches, then two hand-offs": (
        lambda messages: ["search"] * 2 if messages[-1].type == "human" else [TO_BOB] * 2,
        lambda messages: ["search"] * 2 if messages[-1].name == TO_BOB else "done",
    ),
}
EXITS: dict[str, Sequence[Limit]] = {
    "continue": [ToolCallLimit(run_limit=1), STOP],
    "end": [ToolCallLimit(run_limit=1, exit_behavior="end"), STOP],
    "error": [ToolCallLimit(run_limit=1, exit_behavior="error"), STOP],
    "error of models": [ModelCallLimit(thread_limit=5, exit_behavior="error")],
    "finalize at once": [ModelCallLimit(run_limit=1, exit_behavior="finalize")],
    "finalize": [ModelCallLimit(thread_limit=5, exit_behavior="finalize")],
    "give up": [ToolCallLimit(run_limit=1, give_up_after=1), STOP],
    "hand-offs continue": [ToolCallLimit([TO_ALICE, TO_BOB], thread_limit=3), STOP],
    "hand-offs end": [ToolCallLimit([TO_ALICE, TO_BOB], thread_limit=3, exit_behavior="end"), STOP],
}


@pytest.mark.parametrize("per_agent", [False, True], ids=["one state", "a state per agent"])
@pytest.mark.parametrize("limits", EXITS.values(), ids=EXITS.keys())
@pytest.mark.parametrize("scripts", BATCHES.values(), ids=BATCHES.keys())
async def test_histories(
    scripts: tuple[Script, Script], limits: Sequence[Limit], signals: Signals, *, per_agent: bool
) -> None:
    """However a limit stops the swarm, a model is sent nothing broken, and nothing broken is kept.

    Where a limit raises, calls wait for their answer until the next run.
    """
    there = swarm(signals, scripts, limits, per_agent=per_agent)

    for _ in range(2):
        try:
            await there.turn()
        except (ModelCallLimitExceededError, ToolCallLimitExceededError):
            assert any(each.exit_behavior == "error" for each in limits)
        else:
            check_history(there.kept())

    assert sum(there.calls()) >= 2
    there.check_requests()


@pytest.mark.parametrize("batch", [[TO_BOB, "search"], [TO_BOB, TO_BOB]], ids=["search", "two"])
async def test_a_hand_off_to_an_agent_that_fails(batch: list[str], signals: Signals) -> None:
    """A call beside the hand-off, left without an answer by the failure, is taken out for good."""
    there = swarm(
        signals, ([batch], [ZeroDivisionError(), "hello", "bye"]), [ToolCallLimit(run_limit=9)]
    )

    with pytest.raises(ZeroDivisionError):
        await there.turn()
    await there.turn()
    check_history(there.kept())
    await there.turn()

    check_history(there.kept())
    there.check_requests()
    assert [each.text for each in there.kept()[-4:]] == ["Go!", "hello", "Go!", "bye"]


async def test_a_refused_hand_off(signals: Signals) -> None:
    """Of two hand-offs one may be refused: the other is made, and the history shows both."""
    limit = ToolCallLimit(TO_BOB, run_limit=1)
    there = swarm(signals, ([[TO_BOB, TO_BOB]], ["done"]), [limit])

    result = await there.turn()

    answers = [each.text for each in result["messages"] if each.type == "tool"]
    assert sorted(answers) == [
        "Successfully transferred to bob",
        f"Tool call limit exceeded. Do not call {TO_BOB!r} again.",
    ]
    assert result["messages"][-1].text == "done"
    check_history(there.kept())
    there.check_requests()


@pytest.mark.parametrize(
    "limit",
    [ModelCallLimit(thread_limit=1), ToolCallLimit("search", run_limit=0, exit_behavior="end")],
    ids=["model", "tools"],
)
async def test_who_says_that_it_is_over(limit: Limit, signals: Signals) -> None:
    """The message that a limit ends a run with has the name of the agent, like its others."""
    there = swarm(signals, ([[TO_BOB]], [["search"]]), [limit])

    result = await there.turn()

    assert "limit" in result["messages"][-1].text
    assert result["messages"][-1].name == "bob"


# One list of limits for all agents.


async def test_no_tool_is_taken_for_misspelt(
    signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """A hand-off tool that only another agent has is not logged, in any run."""
    there = swarm(
        signals,
        ([[TO_BOB], "a", [TO_BOB]], [[TO_ALICE], "b"]),
        [ToolCallLimit([TO_ALICE, TO_BOB], run_limit=9), ToolCallLimit(["search"], run_limit=9)],
    )

    for _ in range(2):
        await there.turn()

    assert len(there.alice.calls) == 3
    assert caplog.messages == []

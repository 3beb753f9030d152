"""In a swarm: limits stop agents that hand over to each other, and every history stays valid."""

from collections.abc import Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    QuotaMiddleware,
    QuotaWarning,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import Script, ScriptedChatModel
from tests.scene import CONFIG, Middleware, check_history, recording
from tests.signals import Signals

# Among the oldest versions there is none.
langgraph_swarm = pytest.importorskip("langgraph_swarm")

TO_ALICE, TO_BOB = "transfer_to_alice", "transfer_to_bob"
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

    async def play(self, config: Any = CONFIG) -> Any:
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


# What the warning says, and that its remedies work.


async def test_the_warning_without_a_thread(signals: Signals) -> None:
    """A store that has no thread to count by needs the outermost run's thread id."""
    quota: Any = QuotaMiddleware(THREAD, store=MemoryStore(), telemetry=signals.telemetry)
    there = Swarm((["done", "done"], []), quota)

    with pytest.warns(QuotaWarning) as caught:
        await there.play({})

    [text] = [str(each.message) for each in caught]
    assert f"Call the outermost graph with {THREAD_ID}: the store counts by it" in text


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
            await there.play()
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
        await there.play()
    await there.play()
    check_history(there.kept())
    await there.play()

    check_history(there.kept())
    there.check_requests()
    assert [each.text for each in there.kept()[-4:]] == ["Go!", "hello", "Go!", "bye"]


# One list of limits for all agents.

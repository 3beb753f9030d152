"""In a swarm: limits stop agents that hand over to each other, and every history stays valid."""

from collections.abc import Sequence
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    Quota,
    QuotaWarning,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import Script
from tests.scene import CONFIG, Scene, check_history
from tests.telemetry import Signals

# Among the oldest versions there is none.
langgraph_swarm = pytest.importorskip("langgraph_swarm")

TO_ALICE, TO_BOB = "transfer_to_alice", "transfer_to_bob"
PING_PONG: tuple[Script, Script] = (lambda _: [TO_BOB], lambda _: [TO_ALICE])
THREAD = [ModelCallLimit(run_limit=3, thread_limit=6)]
STOP = ModelCallLimit(thread_limit=9, name="stop")
"""Ends what no other limit ends."""


class Swarm:
    """Alice and Bob, who can search and hand over to each other, under limits that a store counts.

    With `per_agent` each keeps a state of its own; with `saves` the swarm has a checkpointer.
    """

    def __init__(
        self,
        signals: Signals,
        scripts: tuple[Script, Script],
        limits: Sequence[Limit],
        *,
        per_agent: bool = False,
        saves: bool = True,
        **options: Any,
    ) -> None:
        # Both have one quota.
        quota = Scene(signals, [], limits, **{"store": MemoryStore(), **options}).quota

        def member(name: str, other: str, script: Script) -> Scene:
            tools = [langgraph_swarm.create_handoff_tool(agent_name=other), "search"]
            own: dict[str, Any] = {"name": name, "checkpointer": per_agent or None}
            return Scene(signals, script, [quota], tools=tools, **own)

        self.both = member("alice", "bob", scripts[0]), member("bob", "alice", scripts[1])
        agents = [each.agent for each in self.both]
        swarm = langgraph_swarm.create_swarm(agents, default_active_agent="alice")
        self.graph: Any = swarm.compile(checkpointer=InMemorySaver() if saves else None)

    async def play(self, config: Any = CONFIG) -> Any:
        """A new run of the swarm."""
        given = {"messages": [("user", "Go!")]}
        return await self.graph.ainvoke(given, {**config, "recursion_limit": 60})

    def calls(self) -> list[int]:
        """How many model calls each agent has made."""
        return [len(each.model.calls) for each in self.both]

    def check(self) -> list[Any]:
        """Assert that what the models were sent and what is kept is valid: what is kept."""
        for each in self.both:
            each.check_requests()
        kept = self.graph.get_state(CONFIG).values["messages"]
        check_history(kept)
        return list(kept)


async def test_without_a_store_nothing_stops_them(signals: Signals) -> None:
    """Without a store every hand-off begins a new budget; a warning says so, and what helps."""
    there = Swarm(signals, PING_PONG, THREAD, store=None)
    with pytest.warns(QuotaWarning) as caught, pytest.raises(GraphRecursionError):
        await there.play()
    (text,) = [str(each.message) for each in caught]
    for remedy in ("store=MemoryStore()", 'Quota(…, per="root_run")', "checkpointer=True"):
        assert remedy in text
    assert sum(there.calls()) > 6
    # A store that has no thread to count by needs the outermost run's thread id.
    there = Swarm(signals, (["done"], []), THREAD, saves=False)
    with pytest.warns(
        QuotaWarning, match="Call the outermost graph with .*thread_id.*counts by it"
    ):
        await there.play({})


@pytest.mark.parametrize(
    ("limits", "options", "config", "calls"),
    [
        # Anew for each question, also without a thread.
        ([ModelCallLimit(quotas=[Quota(6, per="root_run")])], {"saves": False}, {}, [6, 6]),
        (THREAD, {"saves": False}, CONFIG, [3, 3]),
        # Each agent alone.
        (THREAD, {"store": None, "per_agent": True}, CONFIG, [6, 6]),
    ],
    ids=["root run", "store and thread id", "a state per agent"],
)
async def test_remedies(
    limits: Any, options: Any, config: Any, calls: list[int], signals: Signals
) -> None:
    """Each that the warning names holds over two questions, and needs no warning."""
    there = Swarm(signals, PING_PONG, limits, **options)
    # Every warning of a test is an error.
    for _ in range(2):
        await there.play(config)
    assert there.calls() == calls


BATCHES: list[tuple[Script, Script]] = [
    (lambda _: [TO_BOB, "search"], lambda _: ["search", TO_ALICE]),
    (lambda _: [TO_BOB, TO_BOB], lambda _: [TO_ALICE, TO_ALICE]),
    (
        lambda messages: ["search"] * 2 if messages[-1].type == "human" else [TO_BOB] * 2,
        lambda messages: ["search"] * 2 if messages[-1].name == TO_BOB else "done",
    ),
]
HAND_OFFS = ToolCallLimit([TO_ALICE, TO_BOB], thread_limit=3)
EXITS: dict[str, Sequence[Limit]] = {
    "continue": [ToolCallLimit(run_limit=1), STOP],
    "end": [ToolCallLimit(run_limit=1, exit_behavior="end"), STOP],
    "error": [ToolCallLimit(run_limit=1, exit_behavior="error"), STOP],
    "finalize": [ModelCallLimit(thread_limit=5, exit_behavior="finalize")],
    "give up": [ToolCallLimit(run_limit=1, give_up_after=1), STOP],
    "hand-offs continue": [HAND_OFFS, STOP],
}


@pytest.mark.parametrize("limits", EXITS.values(), ids=EXITS.keys())
async def test_histories(limits: Sequence[Limit], signals: Signals) -> None:
    """However a limit stops the swarm, a model is sent nothing broken, and nothing broken is kept.

    Where a limit raises, calls wait for their answer until the next run.
    """
    for scripts, per_agent in zip(BATCHES, (False, True, False), strict=True):
        there = Swarm(signals, scripts, limits, per_agent=per_agent)
        for _ in range(2):
            try:
                await there.play()
            except (ModelCallLimitExceededError, ToolCallLimitExceededError):
                assert any(each.exit_behavior == "error" for each in limits)
                for each in there.both:
                    each.check_requests()
            else:
                there.check()
        assert sum(there.calls()) >= 2

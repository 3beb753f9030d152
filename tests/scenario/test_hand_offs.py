"""In a swarm, and under a supervisor: whatever a limit stops, every history stays valid."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from langchain_core.messages import BaseMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, MessagesState, StateGraph

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
from langchain_quota.testing import Script, ScriptedChatModel, Turn
from tests.scene import CONFIG, Scene, check_history, recording
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


# Among the oldest versions there is none.
langgraph_supervisor = pytest.importorskip("langgraph_supervisor")
handoff = pytest.importorskip("langgraph_supervisor.handoff")

LIMITS: dict[str, Limit] = {
    "continue": ToolCallLimit(run_limit=1),
    "end of tools": ToolCallLimit(run_limit=1, exit_behavior="end"),
    "error of tools": ToolCallLimit(run_limit=1, exit_behavior="error"),
    "end of model calls": ModelCallLimit(run_limit=2),
    "finalize": ModelCallLimit(run_limit=1, exit_behavior="finalize"),
}
TO_ONE, TO_TWO = "transfer_to_one", "transfer_to_two"


def search_on(messages: Sequence[BaseMessage]) -> Turn:
    """Search until a call is refused."""
    return "found" if getattr(messages[-1], "status", "") == "error" else ["search", "search"]


class Team:
    """The agents `one` and `two`, which search until a limit stops them."""

    def __init__(self, signals: Signals, limit: Limit) -> None:
        self.models = [ScriptedChatModel(script=search_on) for _ in range(2)]
        options: dict[str, Any] = {"store": MemoryStore(), "checkpointer": None}
        self.agents = [
            Scene(signals, model, [limit], name=name, **options).agent
            for name, model in zip(("one", "two"), self.models, strict=True)
        ]

    def supervisor(self, *turns: Turn, agents: Any = None, **options: Any) -> Any:
        """The package's supervisor of the agents, with a model that plays these turns."""
        self.models.append(ScriptedChatModel(script=[*turns]))
        agents = self.agents if agents is None else agents
        return langgraph_supervisor.create_supervisor(agents, model=self.models[-1], **options)

    async def play(self, graph: Any) -> list[Any]:
        """Two runs, after which all that was sent and kept is valid: what is kept."""
        compiled = graph.compile(checkpointer=InMemorySaver())
        for text in ("Go!", "And?"):
            with suppress(ModelCallLimitExceededError, ToolCallLimitExceededError):
                await compiled.ainvoke({"messages": [("user", text)]}, CONFIG)
            kept = compiled.get_state(CONFIG).values["messages"]
            check_history(kept)
        for model in self.models:
            for call in model.calls:
                check_history(call.messages)
        return list(kept)


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS.keys())
async def test_agents_that_a_limit_stops(limit: Limit, signals: Signals) -> None:
    """The supervisor and its agents are sent only valid histories, also where it is nested."""
    fails = limit.exit_behavior == "error"
    tools = [recording("search", []), handoff.create_forward_message_tool()]
    forward = ("forward_message", {"from_agent": "one"})
    flat: list[Turn] = [[TO_ONE, TO_TWO, "search"], "Sorry.", [TO_ONE], [forward]]
    both: list[Turn] = [[TO_ONE], [TO_TWO], "Both looked."]
    nested: list[Turn] = [["transfer_to_team"], "Sorry."]
    for mode in ("last_message", "full_history"):
        team = Team(signals, limit)
        kept = await team.play(team.supervisor(*flat, tools=tools, output_mode=mode))
        if not fails:
            # What a limit says in an agent's place is found by the agent's name.
            assert (kept[-1].type, kept[-1].name) == ("ai", "supervisor")
            assert "limit" in kept[-1].text or "found" in kept[-1].text
        team = Team(signals, limit)
        lead = team.supervisor(*both, *both, supervisor_name="lead", output_mode=mode)
        inner = [lead.compile(name="team")]
        outer = team.supervisor(*nested, *nested, agents=inner, output_mode=mode)
        kept = await team.play(outer)
        assert fails or kept[-1].text == "Sorry."


@pytest.mark.parametrize("exit_behavior", ["continue", "end"])
async def test_a_hand_off_beside_a_refused_one(exit_behavior: Any, signals: Signals) -> None:
    """Of parallel hand-offs a limit must refuse all or none.

    The hand-off tool takes the newest message for the one that called it, and fails where that is
    a refusal. The page says so; where "continue" does not fail any more, it need not.
    """
    team = Team(signals, LIMITS["continue"])
    limit = ToolCallLimit([TO_ONE, TO_TWO], run_limit=1, exit_behavior=exit_behavior)
    tools = [langgraph_supervisor.create_handoff_tool(agent_name=name) for name in ("one", "two")]
    own: dict[str, Any] = {"store": MemoryStore(), "checkpointer": None, "name": "supervisor"}
    supervisor = Scene(signals, [[TO_ONE, TO_TWO]] * 2, [limit], tools=tools, **own)
    graph: Any = StateGraph(MessagesState)
    graph.add_node("supervisor", supervisor.agent, destinations=("one", "two", END))
    graph.add_edge(START, "supervisor")
    for agent in team.agents:
        graph.add_node(agent.name, agent)
        graph.add_edge(agent.name, "supervisor")
    if exit_behavior == "continue":
        with pytest.raises(AttributeError, match="'ToolMessage' object has no attribute"):
            await team.play(graph)
    else:
        assert "limit" in (await team.play(graph))[-1].text

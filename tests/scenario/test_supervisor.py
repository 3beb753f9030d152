"""Under a supervisor: whatever a limit stops, every history stays valid."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from langchain_core.messages import BaseMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.scene import CONFIG, Scene, check_history, recording
from tests.telemetry import Signals

# Among the oldest versions there is none.
langgraph_supervisor = pytest.importorskip("langgraph_supervisor")
handoff = pytest.importorskip("langgraph_supervisor.handoff")

# It is built on it.
pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")

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

"""Under a supervisor: whatever a limit stops, every history stays valid."""

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import BaseMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import BaseModel

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    Quota,
    QuotaMiddleware,
    QuotaWarning,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import Script, ScriptedChatModel, Turn
from tests.agent.rules import CONFIG, check_history, recording
from tests.signals import Signals

# Among the oldest versions there is none.
langgraph_supervisor = pytest.importorskip("langgraph_supervisor")
handoff = pytest.importorskip("langgraph_supervisor.handoff")

# It is built on it.
pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")

LIMITS: dict[str, Limit] = {
    "continue": ToolCallLimit(run_limit=1),
    "end of tools": ToolCallLimit(run_limit=1, exit_behavior="end"),
    "give_up_after": ToolCallLimit(run_limit=1, give_up_after=1),
    "error of tools": ToolCallLimit(run_limit=1, exit_behavior="error"),
    "end of model calls": ModelCallLimit(run_limit=2),
    "finalize": ModelCallLimit(run_limit=1, exit_behavior="finalize"),
}
TO_ONE, TO_TWO = "transfer_to_one", "transfer_to_two"
FORWARD = ("forward_message", {"from_agent": "one"})

by_limit = pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS.keys())
by_output_mode = pytest.mark.parametrize("output_mode", ["last_message", "full_history"])


def search_on(messages: Sequence[BaseMessage]) -> Turn:
    """Search until a call is refused."""
    newest = messages[-1]
    is_refused = isinstance(newest, ToolMessage) and newest.status == "error"
    return "found" if is_refused else ["search", "search"]


class Team:
    """The agents `one` and `two`, which search until a limit stops them.

    Args:
        signals: The telemetry.
        limit: What holds each of them.
        **options: Further arguments of `create_agent`.
    """

    def __init__(self, signals: Signals, limit: Limit, **options: Any) -> None:
        self.models: list[ScriptedChatModel] = []
        quota: Any = QuotaMiddleware([limit], store=MemoryStore(), telemetry=signals.telemetry)
        options.setdefault("middleware", [quota])
        self.agents = [
            create_agent(
                self.model(search_on),
                [recording("search", [])],
                name=name,
                **options,
            )
            for name in ("one", "two")
        ]

    def model(self, script: Script) -> ScriptedChatModel:
        """A model whose requests are checked."""
        self.models.append(ScriptedChatModel(script=script))
        return self.models[-1]

    async def turns(self, graph: StateGraph[Any, Any, Any, Any], limit: Limit) -> list[Any]:
        """Two runs; what is kept is checked after each, and in the end what the models were sent.

        Returns:
            What is kept.
        """
        compiled: Any = graph.compile(checkpointer=InMemorySaver())
        for text in ("Go!", "And?"):
            try:
                await compiled.ainvoke({"messages": [("user", text)]}, CONFIG)
            except (ModelCallLimitExceededError, ToolCallLimitExceededError):
                assert limit.exit_behavior == "error"
            kept = compiled.get_state(CONFIG).values["messages"]
            check_history(kept)
        for model in self.models:
            for call in model.calls:
                check_history(call.messages)
        return list(kept)


@by_limit
@by_output_mode
@pytest.mark.parametrize(
    ("calls", "shows_handoffs"),
    [
        ([TO_ONE], True),
        ([TO_ONE, TO_TWO, "search"], True),
        ([TO_ONE, TO_TWO, "search"], False),
    ],
    ids=["one", "parallel", "hidden"],
)
async def test_agents_that_a_limit_stops(
    calls: list[str], limit: Limit, output_mode: Any, signals: Signals, *, shows_handoffs: bool
) -> None:
    """The supervisor and its agents are sent only valid histories, and only such are kept."""
    team = Team(signals, limit)
    model = team.model([calls, "Sorry.", calls, "Bye."])
    graph = langgraph_supervisor.create_supervisor(
        team.agents,
        model=model,
        tools=[recording("search", [])],
        output_mode=output_mode,
        add_handoff_messages=shows_handoffs,
    )

    await team.turns(graph, limit)

    if limit.exit_behavior != "error":
        assert len(model.calls) == 4
        said = [each.text for each in model.calls[1].messages if each.type == "ai"]
        assert any("limit" in each or "found" in each for each in said)


@by_limit
@by_output_mode
async def test_a_message_that_is_forwarded(
    limit: Limit, output_mode: Any, signals: Signals
) -> None:
    """What a limit says in an agent's place is found by the agent's name, and forwarded."""
    team = Team(signals, limit)
    graph = langgraph_supervisor.create_supervisor(
        team.agents,
        model=team.model([[TO_ONE], [FORWARD]] * 2),
        tools=[handoff.create_forward_message_tool()],
        output_mode=output_mode,
    )

    kept = await team.turns(graph, limit)

    if limit.exit_behavior != "error":
        forwarded = kept[-1]
        assert (forwarded.type, forwarded.name) == ("ai", "supervisor")
        assert "limit" in forwarded.text or "found" in forwarded.text


@by_limit
@by_output_mode
async def test_nested_supervisors(limit: Limit, output_mode: Any, signals: Signals) -> None:
    """A supervisor of supervisors is sent only valid histories, too."""
    team = Team(signals, limit)
    inner = langgraph_supervisor.create_supervisor(
        team.agents,
        model=team.model([[TO_ONE], [TO_TWO], "Both looked."] * 2),
        output_mode=output_mode,
        supervisor_name="lead",
    ).compile(name="team")
    graph = langgraph_supervisor.create_supervisor(
        [inner],
        model=team.model([["transfer_to_team"], "Sorry."] * 2),
        output_mode=output_mode,
        supervisor_name="boss",
    )

    kept = await team.turns(graph, limit)

    if limit.exit_behavior != "error":
        assert kept[-1].text == "Sorry."


class Answer(BaseModel):
    """A structured response."""

    text: str


@by_output_mode
@pytest.mark.parametrize("has_limit", [True, False], ids=["limit", "no limit"])
async def test_a_structured_response_beside_a_call(
    output_mode: Any, signals: Signals, *, has_limit: bool
) -> None:
    """The last two messages answer calls: "last_message" copies them alone, with or without limits.

    The page says so; where that is valid some day, it need not.
    """
    quota: Any = QuotaMiddleware([ToolCallLimit(run_limit=0)], telemetry=signals.telemetry)
    agent: Any = create_agent(
        ScriptedChatModel(script=[["search", ("Answer", {"text": "found"})]]),
        [recording("search", [])],
        response_format=ToolStrategy(Answer),
        middleware=[quota] if has_limit else [],
        name="one",
    )
    model = ScriptedChatModel(script=[[TO_ONE], "done"])
    graph: Any = langgraph_supervisor.create_supervisor(
        [agent], model=model, output_mode=output_mode
    ).compile()

    await graph.ainvoke({"messages": [("user", "Go!")]})

    if output_mode == "last_message":
        with pytest.raises(AssertionError, match=r"answers the call .* does not make"):
            check_history(model.calls[-1].messages)
    else:
        check_history(model.calls[-1].messages)


# A supervisor made by `create_agent` has limits of its own.


def by_hand(team: Team, signals: Signals, limit: Limit, script: Script) -> Any:
    """A graph with a supervisor that `create_agent` made, and the hand-off tools of the package."""
    quota: Any = QuotaMiddleware([limit], store=MemoryStore(), telemetry=signals.telemetry)
    supervisor = create_agent(
        team.model(script),
        [
            recording("search", []),
            *(langgraph_supervisor.create_handoff_tool(agent_name=name) for name in ("one", "two")),
        ],
        middleware=[quota],
        name="supervisor",
    )
    graph: Any = StateGraph(MessagesState)
    graph.add_node("supervisor", supervisor, destinations=("one", "two", END))
    graph.add_edge(START, "supervisor")
    for agent in team.agents:
        graph.add_node(agent.name, agent)
        graph.add_edge(agent.name, "supervisor")
    return graph


async def test_a_refused_hand_off(signals: Signals) -> None:
    """The supervisor's model reads that no more hand-offs are left, and answers itself."""
    team = Team(signals, LIMITS["continue"])
    limit = ToolCallLimit([TO_ONE, TO_TWO], thread_limit=1)
    script: Script = [[TO_ONE], [TO_TWO], "I answer it myself.", [TO_ONE], "Bye."]
    graph = by_hand(team, signals, limit, script)

    kept = await team.turns(graph, limit)

    assert [each.text for each in kept if each.name == "supervisor" and each.text] == [
        "I answer it myself.",
        "Bye.",
    ]
    assert len(team.models[1].calls) == 0


@pytest.mark.parametrize("exit_behavior", ["continue", "end"])
async def test_a_hand_off_beside_a_refused_one(exit_behavior: Any, signals: Signals) -> None:
    """Of parallel hand-offs a limit must refuse all or none.

    The hand-off tool takes the newest message for the one that called it, and fails where that is
    a refusal. The page says so; where "continue" does not fail any more, it need not.
    """
    team = Team(signals, LIMITS["continue"])
    limit = ToolCallLimit([TO_ONE, TO_TWO], run_limit=1, exit_behavior=exit_behavior)
    graph = by_hand(team, signals, limit, [[TO_ONE, TO_TWO]] * 2)

    if exit_behavior == "continue":
        with pytest.raises(AttributeError, match="'ToolMessage' object has no attribute"):
            await team.turns(graph, limit)
    else:
        kept = await team.turns(graph, limit)
        assert "limit" in kept[-1].text


# What the warning names as remedies.


async def test_a_limit_of_the_root_run(signals: Signals) -> None:
    """A quota of the root run holds all agents of the supervisor, anew for each question."""
    limit = ModelCallLimit(quotas=[Quota(3, per="root_run")])
    team = Team(signals, limit)
    script = [[TO_ONE], [TO_TWO], [TO_ONE], "Sorry."]
    graph = langgraph_supervisor.create_supervisor(
        team.agents, model=team.model([*script, *script])
    )

    await team.turns(graph, limit)

    assert len(team.models[0].calls) + len(team.models[1].calls) == 6


@pytest.mark.parametrize("remedy", ["none", "store", "checkpointer"])
async def test_thread_limits(remedy: str, signals: Signals) -> None:
    """Without a store an agent is a new one at every hand-off; both remedies make limits hold."""
    store = MemoryStore() if remedy == "store" else None
    limit = ModelCallLimit(thread_limit=2)
    quota: Any = QuotaMiddleware([limit], store=store, telemetry=signals.telemetry)
    team = Team(
        signals, limit, middleware=[quota], checkpointer=True if remedy == "checkpointer" else None
    )
    graph = langgraph_supervisor.create_supervisor(
        team.agents, model=team.model([[TO_ONE], "Sorry.", [TO_ONE], "Bye."])
    )

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await team.turns(graph, limit)

    given = [each for each in caught if each.category is QuotaWarning]
    assert len(given) == (1 if remedy == "none" else 0)
    assert len(team.models[0].calls) == (4 if remedy == "none" else 2)

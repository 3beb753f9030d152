"""A random thread in a graph with a GraphQuota and in an agent with a QuotaMiddleware: the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.tools import BaseTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.types import Command, interrupt
from prometheus_client import CollectorRegistry

from langchain_quota import (
    GraphQuota,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    QuotaMiddleware,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitExceededError,
    usage,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.agent.rules import CONFIG, check_history, recording

TOOLS = ("search", "calc", "ask")

numbers = st.none() | st.integers(0, 4)
batches = st.lists(st.sampled_from([*TOOLS, "invented"]), max_size=4)


@st.composite
def tool_limits(draw: st.DrawFn) -> Limit:
    run = draw(numbers)
    thread = draw(st.integers(0, 9) if run is None else st.none() | st.integers(run, 9))
    exit_behavior: Any = draw(st.sampled_from(["continue", "continue", "end", "error"]))
    give_up_after = None
    if exit_behavior == "continue":
        give_up_after = draw(st.none() | st.integers(1, 3))
    return ToolCallLimit(
        draw(st.sampled_from([None, "search", "calc"])),
        run_limit=run,
        thread_limit=thread,
        exit_behavior=exit_behavior,
        give_up_after=give_up_after,
    )


@st.composite
def model_limits(draw: st.DrawFn) -> Limit:
    return ModelCallLimit(
        run_limit=draw(st.integers(0, 4)),
        thread_limit=draw(st.none() | st.integers(4, 9)),
        exit_behavior=draw(st.sampled_from(["end", "error", "finalize"])),
    )


@dataclass(frozen=True)
class Plan:
    """What happens on a thread.

    Attributes:
        limits: The limits.
        turns: A batch for each model call of a turn; an empty one, and the model is done.
        options: What the model is told, and whether a store counts.
        abandon: At which interrupts the next turn begins instead of a resume.
    """

    limits: list[Limit]
    turns: list[list[list[str]]]
    options: dict[str, bool]
    has_store: bool
    abandon: set[int]
    is_async: bool


plans = st.builds(
    Plan,
    limits=st.builds(
        lambda tools, model: [*tools, *model],
        st.lists(tool_limits(), min_size=1, max_size=3, unique_by=lambda limit: limit.name),
        st.lists(model_limits(), max_size=1),
    ),
    turns=st.lists(st.lists(batches, max_size=4), min_size=1, max_size=3),
    options=st.fixed_dictionaries({"tell_model": st.booleans(), "hide_exhausted": st.booleans()}),
    has_store=st.booleans(),
    abandon=st.sets(st.integers(0, 3), max_size=1),
    is_async=st.booleans(),
)


class Played:
    """A plan, played in a graph or in an agent."""

    def __init__(self, plan: Plan, *, in_graph: bool) -> None:
        self.plan = plan
        self.ran: list[str] = []
        self.queue: list[list[str]] = []
        self.errors: list[str] = []
        self.model = ScriptedChatModel(script=self._answer)
        self.registry = CollectorRegistry()
        tools = [
            recording(name, self.ran, (lambda: interrupt("Sure?")) if name == "ask" else None)
            for name in TOOLS
        ]
        options: dict[str, Any] = {
            **plan.options,
            "store": MemoryStore() if plan.has_store else None,
            "telemetry": Telemetry(registry=self.registry),
        }
        make = self._graph if in_graph else self._agent
        self.app = make(tools, options)

    def _graph(self, tools: Sequence[BaseTool], options: dict[str, Any]) -> Any:
        quota = GraphQuota(self.plan.limits, **options)
        graph = quota.add_to(StateGraph(MessagesState), model=self.model, tools=tools)
        return graph.compile(checkpointer=InMemorySaver())

    def _agent(self, tools: Sequence[BaseTool], options: dict[str, Any]) -> Any:
        quota: AgentMiddleware[Any, Any, Any] = QuotaMiddleware(self.plan.limits, **options)
        return create_agent(self.model, tools, middleware=[quota], checkpointer=InMemorySaver())

    def _answer(self, _messages: Any) -> Any:
        return (self.queue.pop(0) if self.queue else []) or "done"

    async def play(self) -> dict[str, Any]:
        asked = 0
        with captured_decisions() as decisions:
            for turn in self.plan.turns:
                self.queue = list(turn)
                step: Any = {"messages": [("user", "hi")]}
                while step is not None:
                    result = await self._invoke(step)
                    step = None
                    if result.get("__interrupt__"):
                        waiting = result["__interrupt__"]
                        asked += 1
                        if asked - 1 not in self.plan.abandon:
                            step = Command(resume={each.id: "yes" for each in waiting})
        snapshot = self.app.get_state(CONFIG)
        for call in self.model.calls:
            check_history(call.messages)
        return {
            "ran": sorted(self.ran),
            "errors": self.errors,
            "requests": [
                ([each.content for each in call.messages], call.tools) for call in self.model.calls
            ],
            "usage": usage(snapshot),
            "history": [
                (each.type, each.content, getattr(each, "tool_call_id", None))
                for each in snapshot.values["messages"]
            ],
            "decisions": [
                (each.call.kind, each.call.tool, each.call.id, each.outcome, each.limits)
                for each in decisions
            ],
            "metrics": {
                (sample.name, *sorted(sample.labels.items())): sample.value
                for family in self.registry.collect()
                for sample in family.samples
                if sample.name.endswith("_total")
            },
        }

    async def _invoke(self, step: Any) -> dict[str, Any]:
        try:
            if self.plan.is_async:
                return dict(await self.app.ainvoke(step, CONFIG))
            return dict(self.app.invoke(step, CONFIG))
        except (ToolCallLimitExceededError, ModelCallLimitExceededError) as error:
            self.errors.append(str(error))
            return {}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans)
async def test_a_graph_and_an_agent_do_the_same(plan: Plan) -> None:
    """Counts, decisions, signals, requests, what ran and the history are equal."""
    in_agent = await Played(plan, in_graph=False).play()
    in_graph = await Played(plan, in_graph=True).play()
    assert in_graph == in_agent

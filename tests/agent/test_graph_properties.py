"""A random thread in a graph with a GraphQuota and in an agent with a QuotaMiddleware: the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, cycle
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage
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
    QuotaState,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitExceededError,
    usage,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.examples import examples
from tests.scene import CONFIG, check_history, recording

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


@st.composite
def budgets(draw: st.DrawFn) -> Limit:
    run = draw(st.none() | st.integers(0, 100))
    thread = draw(st.integers(0, 200) if run is None else st.none() | st.integers(run, 200))
    least = min((number for number in (run, thread) if number), default=61)
    hold = draw(st.none() | st.integers(1, 40))
    exits = ["end", "error", *(["finalize"] if least > 1 else [])]
    exit_behavior: Any = draw(st.sampled_from(exits))
    keep = draw(st.integers(1, min(60, least - 1))) if exit_behavior == "finalize" else None
    return TokenLimit(
        run_limit=run,
        thread_limit=thread,
        exit_behavior=exit_behavior,
        keep=keep,
        # A number is held earlier in a graph than in an agent.
        reserve=None if hold is None else lambda _: hold,
    )


@dataclass(frozen=True)
class Plan:
    """What happens on a thread.

    Attributes:
        limits: The limits.
        turns: A batch for each model call of a turn; an empty one, and the model is done.
        tokens: What the model calls use, one after the other, over and over.
        options: What the model is told, and whether a store counts.
        abandon: At which interrupts the next turn begins instead of a resume.
    """

    limits: list[Limit]
    turns: list[list[list[str]]]
    tokens: list[int]
    options: dict[str, bool]
    has_store: bool
    abandon: set[int]
    is_async: bool


plans = st.builds(
    Plan,
    limits=st.builds(
        lambda tools, model, tokens: [*tools, *model, *tokens],
        st.lists(tool_limits(), min_size=1, max_size=3, unique_by=lambda limit: limit.name),
        st.lists(model_limits(), max_size=1),
        st.lists(budgets(), max_size=1),
    ),
    turns=st.lists(st.lists(batches, max_size=4), min_size=1, max_size=3),
    tokens=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    options=st.fixed_dictionaries({"tell_model": st.booleans(), "hide_exhausted": st.booleans()}),
    has_store=st.booleans(),
    abandon=st.sets(st.integers(0, 3), max_size=1),
    is_async=st.booleans(),
)


class Played:
    """A plan, played in a graph or in an agent."""

    def __init__(self, plan: Plan, place: str) -> None:
        self.plan = plan
        self.ran: list[str] = []
        self.queue: list[list[str]] = []
        self.tokens, self.ids = cycle(plan.tokens), count(1)
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
        make: dict[str, Any] = {"agent": self._agent, "graph": self._graph, "node": self._node}
        self.app = make[place](tools, options)

    def _graph(self, tools: Sequence[BaseTool], options: dict[str, Any]) -> Any:
        quota = GraphQuota(self.plan.limits, **options)
        graph = quota.add_to(StateGraph(MessagesState), model=self.model, tools=tools)
        return graph.compile(checkpointer=InMemorySaver())

    def _node(self, tools: Sequence[BaseTool], options: dict[str, Any]) -> Any:
        quota = GraphQuota(self.plan.limits, **options)

        def call(state: QuotaState[Any]) -> Any:
            return {"messages": [quota.call_model(self.model, state, tools)]}

        async def acall(state: QuotaState[Any]) -> Any:
            return {"messages": [await quota.acall_model(self.model, state, tools)]}

        node: Any = acall if self.plan.is_async else call
        graph = quota.add_to(StateGraph(MessagesState), model=node, tools=tools)
        return graph.compile(checkpointer=InMemorySaver())

    def _agent(self, tools: Sequence[BaseTool], options: dict[str, Any]) -> Any:
        quota: AgentMiddleware[Any, Any, Any] = QuotaMiddleware(self.plan.limits, **options)
        return create_agent(self.model, tools, middleware=[quota], checkpointer=InMemorySaver())

    def _answer(self, _messages: Any) -> Any:
        batch = self.queue.pop(0) if self.queue else []
        used = next(self.tokens)
        return AIMessage(
            "" if batch else "done",
            tool_calls=[
                {"name": name, "args": {}, "id": f"call_{next(self.ids)}"} for name in batch
            ],
            usage_metadata={"input_tokens": used, "output_tokens": 0, "total_tokens": used},
        )

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


@examples(60)
@given(plan=plans)
async def test_a_graph_and_an_agent_do_the_same(plan: Plan) -> None:
    """Counts, decisions, signals, requests, what ran and the history are equal.

    So they are where the graph has a model's node of its own, with `call_model`.
    """
    in_agent = await Played(plan, "agent").play()
    assert await Played(plan, "graph").play() == in_agent
    assert await Played(plan, "node").play() == in_agent

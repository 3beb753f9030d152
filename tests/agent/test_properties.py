"""The four rules, on random limiters, batches, interrupts, reviews and failures, in real agents.

1. A call over a limit does not run.
2. Thread and run counts equal the calls that were let through and not taken back.
3. Every tool call in the history has exactly one answer, behind the message that made it.
4. What the model is sent is a valid history at every turn, and a run ends with an answer.

The models leave out the ids of calls, repeat them, call tools that do not exist, fail, and are done
early. Runs are cut off.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any

from hypothesis import given, reject
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware
from langchain_core.messages import AIMessage, BaseMessage, ToolCall
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import InjectedToolCallId, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.types import Command, interrupt
from prometheus_client import CollectorRegistry

from langchain_quota import (
    Call,
    ModelCallLimit,
    ModelCallLimitExceededError,
    ModelCallLimitMiddleware,
    QuotaMiddleware,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitExceededError,
    ToolCallLimitMiddleware,
)
from langchain_quota.limits import Limit
from langchain_quota.resolved import ResolvedLimit
from langchain_quota.testing import ScriptedChatModel, ToolRequest
from tests.examples import examples
from tests.scene import check_history

TOOLS = ("search", "calc", "ask")
INVENTED = "invented"
"""A tool that no agent has."""
REVIEWED = "calc"


class ProviderError(Exception):
    """The model's provider fails."""


Batch = list[ToolRequest]
"""The tool calls of one answer; none, and the model says that it is done."""


@dataclass(frozen=True)
class TurnPlan:
    """What the model does in a turn, and what people do at its interrupts.

    Attributes:
        answers: A batch for each model call; `None` for a provider that fails.
        people: What is done at each interrupt, in turn; `"abandon"` begins the next turn instead.
        steps: How many steps of the graph are made until the turn is cut off, if it is.
    """

    answers: list[Batch | None]
    people: list[str]
    steps: int | None = None


@dataclass(frozen=True)
class Scenario:
    """Limits, as a stack of drop-ins or in one QuotaMiddleware, and the turns of one thread."""

    limits: list[Limit]
    stacked: bool
    turns: list[TurnPlan]
    reviewed: bool
    is_async: bool


@dataclass
class World:
    """What really happened."""

    started: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Task of the graph -> the tool that it started, and the id of the call."""
    started_in_run: dict[str, tuple[str, str]] = field(default_factory=dict)
    model_returned: int = 0
    model_returned_in_run: int = 0
    failed: int = 0
    failed_in_run: int = 0
    cut_calls: int = 0
    """Calls that were waiting when a turn was cut off: charged or not, they did not run."""
    edited_calls: int = 0
    """Calls that a reviewer edited and a limit then refused with an exception: as `cut_calls`."""
    cut_models: int = 0
    """Model calls that may have been counted and not made, or the other way round."""
    queue: list[Batch | None] = field(default_factory=list)

    def new_run(self, answers: list[Batch | None]) -> None:
        self.queue = list(answers)
        self.started_in_run = {}
        self.model_returned_in_run = 0
        self.failed_in_run = 0

    def start(self, name: str, call_id: str, config: RunnableConfig) -> None:
        """Note a call; the task is the same when an interrupt runs the tool again."""
        task = config["metadata"]["langgraph_checkpoint_ns"]
        self.started[task] = self.started_in_run[task] = name, call_id

    def answer(self, _messages: Sequence[BaseMessage]) -> Any:
        batch = self.queue.pop(0) if self.queue else []
        if batch is None:
            self.failed += 1
            self.failed_in_run += 1
            return ProviderError("overloaded")
        self.model_returned += 1
        self.model_returned_in_run += 1
        return list(batch) or "done"

    def cut_off(self, messages: Sequence[BaseMessage]) -> None:
        self.cut_models += 1
        for message in reversed(messages):
            if isinstance(message, AIMessage):
                self.cut_calls += len(message.tool_calls)
                return


WORLD: ContextVar[World] = ContextVar("WORLD")
"""Where the tools run."""
CallId = Annotated[str, InjectedToolCallId]


@tool
def search(call_id: CallId, config: RunnableConfig) -> str:
    """Search."""
    WORLD.get().start("search", call_id, config)
    return "found"


@tool
async def calc(call_id: CallId, config: RunnableConfig) -> str:
    """Calculate."""
    return calc_now(call_id, config)


@tool
def ask(call_id: CallId, config: RunnableConfig) -> str:
    """Ask a human."""
    WORLD.get().start("ask", call_id, config)
    return str(interrupt("what?"))


def calc_now(call_id: CallId, config: RunnableConfig) -> str:
    WORLD.get().start("calc", call_id, config)
    return "42"


calc.func = calc_now
REAL_TOOLS = [search, calc, ask]
"""Made once: to make a tool takes as long as to run an agent."""


class Unknown(AgentMiddleware[Any, Any, Any]):
    """Notes the calls of tools that do not exist, which LangChain itself answers."""

    def __init__(self, start: Callable[[str, str, RunnableConfig], None]) -> None:
        super().__init__()
        self._start = start

    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        self._note(request)
        return handler(request)

    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        self._note(request)
        return await handler(request)

    def _note(self, request: Any) -> None:
        if request.tool is None:
            call = request.tool_call
            self._start(call["name"], call["id"], request.runtime.config)


def batches(*tools: str) -> st.SearchStrategy[Batch]:
    """Batches as models make them: with an id for each call, most of the time, and real tools."""
    odd = st.builds(
        ToolCall,
        name=st.sampled_from([*tools, *tools, INVENTED]),
        args=st.just({}),
        id=st.sampled_from([None, "", "same", "same"]),
        type=st.just("tool_call"),
    )
    plain = st.sampled_from([*tools, *tools, INVENTED])
    return st.one_of(
        st.lists(st.sampled_from(tools), min_size=1, max_size=4),
        st.lists(st.one_of(plain, plain, odd), min_size=1, max_size=4),
    )


def answers(*tools: str) -> st.SearchStrategy[Batch | None]:
    """Batches; some models fail, or are done before that."""
    batch = batches(*tools)
    return st.one_of(batch, batch, batch, batch, st.none(), st.just(list[ToolRequest]()))


@st.composite
def limit_lists(draw: st.DrawFn, *, stacked: bool) -> list[Limit]:
    limits: list[Limit] = []
    for index in range(draw(st.integers(2 if stacked else 1, 3 if stacked else 4))):
        target = draw(st.sampled_from(["search", "search", "calc", "ask", None, None, "model"]))
        thread, run = draw(st.tuples(*[st.sampled_from([0, 1, 2, 3, 9])] * 2))
        options: Any = {"name": f"limit-{index}"}
        scopes = draw(st.sampled_from(["thread", "run", "both"]))
        options["thread_limit"] = None if scopes == "run" else thread
        options["run_limit"] = None if scopes == "thread" else min(run, thread)
        if not stacked:
            options["enforce"] = draw(st.sampled_from([True, True, True, False]))
        enforced = options.get("enforce", True)
        if target == "model":
            exits = ["end", "error"] if stacked or not enforced else ["end", "error", "finalize"]
            limits.append(ModelCallLimit(exit_behavior=draw(st.sampled_from(exits)), **options))
            continue
        common = "error" if stacked else "continue"
        options["exit_behavior"] = draw(st.sampled_from(["continue", "end", "error", common]))
        tools: Any = target
        if not stacked:
            if enforced and options["exit_behavior"] == "continue":
                options["give_up_after"] = draw(st.sampled_from([None, None, 1, 3]))
            if target == "ask":
                tools = ["ask", "search"]
            elif target is None:
                options["exclude"] = draw(st.sampled_from([(), ("calc",)]))
        limits.append(ToolCallLimit(tools, **options))
    return limits


turn_plans = st.builds(
    TurnPlan,
    answers=st.lists(answers(*TOOLS), min_size=1, max_size=3),
    people=st.lists(
        st.sampled_from(["approve", "approve", "reject", "respond", "edit", "abandon"]),
        max_size=6,
    ),
    steps=st.one_of(st.none(), st.none(), st.none(), st.integers(2, 12)),
)


def scenarios(*, stacked: bool) -> st.SearchStrategy[Scenario]:
    return st.builds(
        Scenario,
        limits=limit_lists(stacked=stacked),
        stacked=st.just(stacked),
        turns=st.lists(turn_plans, min_size=1, max_size=3),
        reviewed=st.booleans(),
        is_async=st.booleans(),
    )


PATIENT = examples(80)


@PATIENT
@given(scenarios(stacked=True))
def test_four_rules_of_a_stack(scenario: Scenario) -> None:
    """Drop-ins in any order: counts equal what ran, and every history is valid."""
    asyncio.run(_play(scenario))


@PATIENT
@given(scenarios(stacked=False))
def test_four_rules_of_a_quota(scenario: Scenario) -> None:
    """QuotaMiddleware with any limits: counts equal what ran, and every history is valid."""
    asyncio.run(_play(scenario))


async def _play(scenario: Scenario) -> None:
    world = World()
    WORLD.set(world)
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry, spans="off")
    model = ScriptedChatModel(script=world.answer)
    limiters = _limiters(scenario, telemetry)
    review: list[Any] = (
        [HumanInTheLoopMiddleware(interrupt_on={REVIEWED: True})] if scenario.reviewed else []
    )
    agent: Any = create_agent(
        model,
        REAL_TOOLS,
        middleware=[*limiters, *review, Unknown(world.start)],
        checkpointer=InMemorySaver(),
    )

    for turn in [*scenario.turns, TurnPlan([], [])]:
        world.new_run([_fair(scenario, each) for each in turn.answers])
        config: Any = {"configurable": {"thread_id": "thread"}}
        if turn.steps is not None:
            config["recursion_limit"] = turn.steps
        people = list(turn.people)
        graph_input: Any = {"messages": [("user", "go on")]}
        try:
            while graph_input is not None:
                if scenario.is_async:
                    result = await agent.ainvoke(graph_input, config)
                else:
                    result = await asyncio.to_thread(agent.invoke, graph_input, config)
                graph_input = _resume(result.get("__interrupt__", ()), people)
            finished = not result.get("__interrupt__")
        except (ToolCallLimitExceededError, ModelCallLimitExceededError, ProviderError) as error:
            finished = False
            is_refused = isinstance(error, ToolCallLimitExceededError)
            world.edited_calls += turn.people.count("edit") * is_refused
        except GraphRecursionError:
            finished = False
            world.cut_off(agent.get_state(config).values["messages"])
        _check_limits(scenario, world)
        if finished:
            state = agent.get_state(config).values
            _check_counts(scenario, world, state)
            check_history(state["messages"])
            assert state["messages"][-1].type == "ai"

    for call in model.calls:
        check_history(call.messages)
    for limit in scenario.limits:
        _check_charges(scenario, limit, world, registry)


def _fair(scenario: Scenario, batch: Batch | None) -> Batch | None:
    """The batch, with an id for each call that LangChain needs one for before a limit gives it.

    A review comes before the limits. Drop-ins give ids where they judge a call of the message: one
    that no review has rejected or edited.
    """
    if batch is None:
        return None
    names = [each["name"] if isinstance(each, dict) else str(each) for each in batch]
    reviewed = {REVIEWED} if scenario.reviewed else set[str]()
    calls = [Call("tool", name) for name in names if name not in reviewed]
    gets_ids = not scenario.stacked or any(
        limit.matches(call) for limit in scenario.limits for call in calls
    )
    return [
        each if gets_ids and name not in reviewed else _with_id(each, name)
        for each, name in zip(batch, names, strict=True)
    ]


def _with_id(request: ToolRequest, name: str) -> ToolRequest:
    return name if isinstance(request, dict) and not request["id"] else request


def _limiters(scenario: Scenario, telemetry: Telemetry) -> list[Any]:
    if not scenario.stacked:
        try:
            return [QuotaMiddleware(scenario.limits, telemetry=telemetry)]
        except ValueError as error:
            if "can never be reached" not in str(error):
                raise
            reject()
    return [drop_in(limit, telemetry) for limit in scenario.limits]


def drop_in(limit: Limit, telemetry: Telemetry) -> Any:
    options: Any = {
        "thread_limit": limit.thread_limit,
        "run_limit": limit.run_limit,
        "exit_behavior": limit.exit_behavior,
        "limit_name": limit.name,
        "telemetry": telemetry,
    }
    if isinstance(limit, ModelCallLimit):
        return ModelCallLimitMiddleware(**options)
    assert isinstance(limit, ToolCallLimit)
    tool_name: Any = limit.tool_name
    return ToolCallLimitMiddleware(tool_name=tool_name, **options)


def _resume(interrupts: Sequence[Any], people: list[str]) -> Command[Any] | None:
    if not interrupts:
        return None
    answers: dict[str, Any] = {}
    for each in interrupts:
        action = people.pop(0) if people else "approve"
        if action == "abandon":
            return None
        if isinstance(each.value, dict):
            requests = each.value["action_requests"]
            answers[each.id] = {"decisions": [_review(action) for _ in requests]}
        else:
            answers[each.id] = action
    return Command(resume=answers)


def _review(action: str) -> dict[str, Any]:
    match action:
        case "edit":
            return {"type": "edit", "edited_action": {"name": "search", "args": {}}}
        case "reject" | "respond":
            return {"type": action, "message": "no"}
    return {"type": "approve"}


def _ran(scenario: Scenario, limit: Limit, world: World) -> tuple[int, int]:
    """The calls that count for a limit, in the thread and in the run."""
    if limit.kind == "model":
        # A drop-in counts a call that has returned, QuotaMiddleware one that was let through.
        failed = (0, 0) if scenario.stacked else (world.failed, world.failed_in_run)
        return world.model_returned + failed[0], world.model_returned_in_run + failed[1]
    return _matching(limit, world.started), _matching(limit, world.started_in_run)


def _matching(limit: Limit, started: dict[str, tuple[str, str]]) -> int:
    return sum(limit.matches(Call("tool", name)) for name, _ in started.values())


def _astray(scenario: Scenario, limit: Limit, world: World) -> tuple[int, int]:
    """The fewest and the most calls that cut-off runs may have counted beyond those that ran."""
    if limit.kind == "tool":
        # What stacked limits before the one that raised have charged for an edited call stays.
        return 0, world.cut_calls + (world.edited_calls if scenario.stacked else 0)
    return (-world.cut_models, 0) if scenario.stacked else (0, world.cut_models)


def _check_limits(scenario: Scenario, world: World) -> None:
    """Rule 1."""
    for limit in scenario.limits:
        if limit.enforce:
            in_thread, in_run = _ran(scenario, limit, world)
            terms = ResolvedLimit.of(limit)
            missed = -_astray(scenario, limit, world)[0]
            assert terms.thread_limit is None or in_thread <= terms.thread_limit + missed
            assert terms.run_limit is None or in_run <= terms.run_limit


def _check_counts(scenario: Scenario, world: World, state: dict[str, Any]) -> None:
    """Rule 2."""
    ledger = state["langchain_quota"]
    for limit in scenario.limits:
        if limit.kind == "model":
            thread, run = state.get("thread_model_call_count", 0), ledger["run_model"]
        else:
            thread = state.get("thread_tool_call_count", {}).get(limit.counter, 0)
            run = ledger["run_tools"].get(limit.counter, 0)
        in_thread, in_run = _ran(scenario, limit, world)
        least, most = _astray(scenario, limit, world)
        assert least <= thread - in_thread <= most
        assert run == in_run


def _check_charges(
    scenario: Scenario, limit: Limit, world: World, registry: CollectorRegistry
) -> None:
    """Rule 2, as the metrics tell it: charged = allowed - refunded."""

    def decisions(decision: str, *scopes: str) -> float:
        labels = {"agent": "unnamed", "limit": limit.name, "decision": decision}
        name = "langchain_quota_limit_decisions_total"
        return sum(
            registry.get_sample_value(name, {**labels, "scope": scope}) or 0 for scope in scopes
        )

    counted = decisions("allowed", "none") - decisions("refunded", "none")
    ran, _ = _ran(scenario, limit, world)
    least, most = _astray(scenario, limit, world)
    if limit.enforce:
        assert least <= counted - ran <= most
    else:
        # What it would have blocked ran all the same, unless another limit refused it.
        blocked = decisions("would_block", "thread", "run")
        assert counted <= ran + most
        assert ran + least <= counted + blocked

"""Which trace the spans of a run belong to: the caller's, or one of the run's own."""

import asyncio
import contextlib
import inspect
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.types import Command, interrupt
from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision as Sampling
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, SamplingResult
from opentelemetry.trace import NoOpTracerProvider
from prometheus_client import CollectorRegistry

from langchain_quota import (
    ModelCallLimit,
    ModelCallLimitExceededError,
    ModelCallLimitMiddleware,
    QuotaMiddleware,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitExceededError,
    ToolCallLimitMiddleware,
)
from langchain_quota.state import LEDGER
from langchain_quota.telemetry.tracing import Spans
from langchain_quota.testing import ScriptedChatModel

if TYPE_CHECKING:
    from tests.signals import Signals

Limiters = Callable[[Telemetry], Sequence[Any]]

THREAD: RunnableConfig = {"configurable": {"thread_id": "thread-1"}}


def quota(telemetry: Telemetry) -> Sequence[Any]:
    limits: list[ModelCallLimit | ToolCallLimit] = [
        ModelCallLimit(run_limit=9),
        ToolCallLimit("search", run_limit=1),
        ToolCallLimit(run_limit=9),
    ]
    return [QuotaMiddleware(limits, telemetry=telemetry)]


def only_tools(telemetry: Telemetry) -> Sequence[Any]:
    # The first that is judged is then a batch.
    return [ToolCallLimitMiddleware(tool_name="search", run_limit=1, telemetry=telemetry)]


def stacked(telemetry: Telemetry) -> Sequence[Any]:
    return [
        ModelCallLimitMiddleware(run_limit=9, telemetry=telemetry),
        ToolCallLimitMiddleware(tool_name="search", run_limit=1, telemetry=telemetry),
        ToolCallLimitMiddleware(run_limit=9, telemetry=telemetry),
    ]


limiters = pytest.mark.parametrize("limiters", [quota, only_tools, stacked])
forms = pytest.mark.parametrize("form", ["ainvoke", "invoke"])
all_forms = pytest.mark.parametrize("form", ["ainvoke", "astream", "invoke", "stream"])


@tool
def search(query: str = "") -> str:
    """Search."""
    return "found"


@tool
def ask(question: str = "") -> str:
    """Ask the user."""
    return str(interrupt("what?"))


def again(*turns: Any) -> Callable[[Sequence[Any]], Any]:
    """A script that depends only on the history, so that runs and processes can share it."""

    def script(messages: Sequence[Any]) -> Any:
        newest = max(i for i, each in enumerate(messages) if isinstance(each, HumanMessage))
        answer = turns[sum(isinstance(each, AIMessage) for each in messages[newest:])]
        if isinstance(answer, str):
            return answer
        # Ids of one's own, since a call that has an answer is no longer pending.
        calls = [(name, f"call-{len(messages)}-{i}") for i, name in enumerate(answer)]
        return AIMessage("", tool_calls=[{"name": n, "args": {}, "id": i} for n, i in calls])

    return script


SEARCHING = again(["search", "search"], ["search"], "done")


def agent_of(
    middleware: Sequence[Any], script: Any = SEARCHING, tools: Any = (search, ask), saver: Any = ...
) -> Any:
    return create_agent(
        ScriptedChatModel(script=script),
        list(tools),
        middleware=list(middleware),
        checkpointer=InMemorySaver() if saver is ... else saver,
        name="researcher",
    )


async def run(
    agent: Any, inputs: Any = ..., form: str = "ainvoke", config: RunnableConfig = THREAD
) -> None:
    inputs = hello() if inputs is ... else inputs
    before = otel.get_current()
    match form:
        case "ainvoke":
            await agent.ainvoke(inputs, config)
        case "astream":
            async for _ in agent.astream(inputs, config, stream_mode="updates"):
                pass
        case "invoke":
            agent.invoke(inputs, config)
        case "stream":
            for _ in agent.stream(inputs, config):
                pass
    assert otel.get_current() is before


def hello() -> dict[str, Any]:
    return {"messages": [HumanMessage("hi")]}


async def resume(agent: Any, form: str = "ainvoke", config: RunnableConfig = THREAD) -> None:
    """Approve what a human is to review, or answer the question that a tool asks."""
    tasks = (await agent.aget_state(config)).tasks
    (asked,) = [pending.value for task in tasks for pending in task.interrupts]
    answer: Any = "that"
    if not isinstance(asked, str):
        answer = {"decisions": [{"type": "approve"} for _ in asked["action_requests"]]}
    await run(agent, Command(resume=answer), form, config)


async def in_mid_run(agent: Any, config: RunnableConfig = THREAD) -> bool:
    return bool((await agent.aget_state(config)).next)


async def kept(agent: Any, config: RunnableConfig = THREAD) -> Any:
    """The trace that is kept with the run."""
    return (await agent.aget_state(config)).values[LEDGER].get("trace")


def judged(signals: "Signals") -> list[ReadableSpan]:
    return [span for span in signals.spans() if span.name.startswith("check_quota")]


def others(signals: "Signals") -> "Signals":
    """Telemetry as another process has it."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry, tracer_provider=provider)
    return type(signals)(telemetry, registry, provider, exporter)


def decisions(spans: Sequence[ReadableSpan]) -> list[Any]:
    return [(span.attributes or {})["langchain_quota.decision"] for span in spans]


def exemplars(registry: CollectorRegistry) -> set[str]:
    return {
        sample.exemplar.labels["trace_id"]
        for family in registry.collect()
        for sample in family.samples
        if sample.exemplar
    }


def assert_below(spans: Sequence[ReadableSpan], parent: trace.SpanContext) -> None:
    for span in spans:
        assert span.parent is not None
        assert span.parent.span_id == parent.span_id
        assert span.context.trace_id == parent.trace_id


def assert_one_trace(spans: Sequence[ReadableSpan]) -> None:
    """All are children of the first one, which has no parent."""
    first, *later = spans
    assert first.parent is None
    assert_below(later, first.context)


@limiters
@forms
async def test_below_the_active_span(limiters: Limiters, form: str, signals: "Signals") -> None:
    """With an active span ours are its children, and nothing about traces is kept."""
    agent = agent_of(limiters(signals.telemetry))
    with signals.provider.get_tracer("app").start_as_current_span("request") as request:
        await run(agent, form=form)
    spans = judged(signals)
    assert len(spans) >= 3
    assert_below(spans, request.get_span_context())
    assert await kept(agent) is None


@limiters
async def test_the_active_span_goes_before_what_is_kept(
    limiters: Limiters, signals: "Signals"
) -> None:
    """A resume below a span is its child; what is kept stays, for a resume without one."""
    approval = HumanInTheLoopMiddleware(interrupt_on={"search": True})
    agent = agent_of([approval, *limiters(signals.telemetry)])
    await run(agent)
    assert await in_mid_run(agent)
    known = await kept(agent)
    own = judged(signals)
    assert_one_trace(own)
    signals.exporter.clear()
    with signals.provider.get_tracer("app").start_as_current_span("request") as request:
        await resume(agent)
    assert await in_mid_run(agent)
    below = judged(signals)
    assert below
    assert_below(below, request.get_span_context())
    assert await kept(agent) == known
    signals.exporter.clear()
    await resume(agent)
    assert not await in_mid_run(agent)
    assert_below(judged(signals), own[0].context)


@limiters
@forms
async def test_one_run_is_one_trace(limiters: Limiters, form: str, signals: "Signals") -> None:
    """With no active span all spans of a run are children of its first one."""
    agent = agent_of(limiters(signals.telemetry))
    await run(agent, form=form)
    spans = judged(signals)
    assert set(decisions(spans)) == {"allowed", "blocked"}
    assert len(spans) >= 3
    assert_one_trace(spans)


@limiters
@forms
async def test_a_new_run_is_a_new_trace(limiters: Limiters, form: str, signals: "Signals") -> None:
    """The next turn of a thread begins its own trace; so does one after an abandoned run."""
    agent = agent_of(limiters(signals.telemetry), again(["search", "ask"], "done"))
    traces = set()
    for _ in range(3):
        signals.exporter.clear()
        await run(agent, form=form)
        assert await in_mid_run(agent)
        assert_one_trace(judged(signals))
        traces.add(judged(signals)[0].context.trace_id)
    assert len(traces) == 3


@limiters
@forms
async def test_a_run_goes_on_in_its_trace(
    limiters: Limiters, form: str, signals: "Signals"
) -> None:
    """An approval by a human, and the answer to a tool's question, resume the run's trace."""
    approval = HumanInTheLoopMiddleware(interrupt_on={"search": True})
    agent = agent_of(
        [*limiters(signals.telemetry), approval],
        again(["search", "search"], ["ask"], ["search"], "done"),
    )
    await run(agent, form=form)
    assert await in_mid_run(agent)
    seen = len(judged(signals))
    steps = 0
    while await in_mid_run(agent):
        steps += 1
        await resume(agent, form)
    assert steps >= 2
    assert len(judged(signals)) > seen
    assert_one_trace(judged(signals))


@limiters
@pytest.mark.parametrize("form", ["ainvoke", "astream"])
async def test_another_process_goes_on_in_the_trace(
    limiters: Limiters, form: str, signals: "Signals", sqlite_saver: AsyncSqliteSaver
) -> None:
    """A resume by an agent that was made anew, on the same threads, has the same trace."""
    script = again(["search", "ask"], ["search"], "done")
    await run(agent_of(limiters(signals.telemetry), script, saver=sqlite_saver), form=form)
    elsewhere = others(signals)
    agent = agent_of(limiters(elsewhere.telemetry), script, saver=sqlite_saver)
    known = await kept(agent)
    assert json.loads(json.dumps(known)) == known
    await resume(agent, form)
    assert not await in_mid_run(agent)
    assert judged(elsewhere)
    assert_below(judged(elsewhere), judged(signals)[0].context)


@limiters
async def test_concurrent_runs_do_not_mix(limiters: Limiters, signals: "Signals") -> None:
    """20 runs at once, interrupted and resumed: 20 traces, each of one thread."""
    agent = agent_of(limiters(signals.telemetry), again(["search", "ask"], ["search"], "done"))
    configs: list[RunnableConfig] = [{"configurable": {"thread_id": f"t{i}"}} for i in range(20)]
    await asyncio.gather(*(run(agent, config=config) for config in configs))
    await asyncio.gather(*(resume(agent, config=config) for config in configs))
    assert_a_trace_per_thread(judged(signals), 20)


@limiters
@pytest.mark.parametrize("form", ["abatch", "batch"])
async def test_each_run_of_a_batch_is_a_trace(
    limiters: Limiters, form: str, signals: "Signals"
) -> None:
    """The runs of one batch are traces of their own."""
    agent = agent_of(limiters(signals.telemetry))
    configs: list[RunnableConfig] = [{"configurable": {"thread_id": f"t{i}"}} for i in range(4)]
    if form == "abatch":
        await agent.abatch([hello() for _ in configs], configs)
    else:
        agent.batch([hello() for _ in configs], configs)
    assert_a_trace_per_thread(judged(signals), 4)


def assert_a_trace_per_thread(spans: Sequence[ReadableSpan], threads: int) -> None:
    by_thread = defaultdict(list)
    for span in spans:
        by_thread[(span.attributes or {})["gen_ai.conversation.id"]].append(span)
    assert len(by_thread) == threads
    for own in by_thread.values():
        assert len(own) >= 2
        assert_one_trace(own)
    assert len({own[0].context.trace_id for own in by_thread.values()}) == threads


def boss_of(child: Any, telemetry: Telemetry, limiters: Limiters) -> Any:
    @tool
    async def delegate(task: str = "") -> str:
        """Delegate."""
        await child.ainvoke(hello())
        return "done"

    twice = again(["delegate", "search"], ["delegate", "search"], "done")
    return agent_of(limiters(telemetry), twice, [delegate, search])


@limiters
async def test_a_sub_agent_has_traces_of_its_own(limiters: Limiters, signals: "Signals") -> None:
    """Without an active span each run of an agent in a tool is a trace, as is its parent's run."""
    below = others(signals)
    child = agent_of(limiters(below.telemetry), saver=None)
    await run(boss_of(child, signals.telemetry, limiters))
    assert_one_trace(judged(signals))
    spans = judged(below)
    half = len(spans) // 2
    assert_one_trace(spans[:half])
    assert_one_trace(spans[half:])
    firsts = (judged(signals)[0], spans[0], spans[half])
    assert len({span.context.trace_id for span in firsts}) == 3


@limiters
async def test_a_sub_agent_below_the_active_span(limiters: Limiters, signals: "Signals") -> None:
    """With an active span those of an agent in a tool are its children, too."""
    child = agent_of(limiters(signals.telemetry), saver=None)
    boss = boss_of(child, signals.telemetry, limiters)
    with signals.provider.get_tracer("app").start_as_current_span("request") as request:
        await run(boss)
    assert len(judged(signals)) >= 6
    assert_below(judged(signals), request.get_span_context())


SILENT: Mapping[str, Callable[["Signals"], Telemetry]] = {
    "no SDK": lambda _: Telemetry(
        registry=CollectorRegistry(), tracer_provider=NoOpTracerProvider()
    ),
    "no global provider": lambda _: Telemetry(registry=CollectorRegistry()),
    "off": lambda signals: Telemetry(
        registry=CollectorRegistry(), tracer_provider=signals.provider, spans="off"
    ),
}


@pytest.mark.parametrize("silent", SILENT)
@limiters
@forms
async def test_without_spans_nothing_is_kept(
    silent: str, limiters: Limiters, form: str, signals: "Signals"
) -> None:
    """Without an SDK, or with spans off, no trace is written at any step."""
    agent = agent_of(limiters(SILENT[silent](signals)))
    await run(agent, form=form)
    assert judged(signals) == []
    states = [each async for each in agent.aget_state_history(THREAD)]
    assert len(states) > 5
    assert all((each.values.get(LEDGER) or {}).get("trace") is None for each in states)


@pytest.mark.parametrize("silent", [*SILENT, "refused", "active"])
async def test_the_drop_in_returns_none(silent: str, signals: "Signals") -> None:
    """Under the limit `before_model` is exactly `None`, as LangChain's, where nothing is kept."""
    spans: Spans = "refused" if silent == "refused" else "all"
    telemetry = (
        SILENT[silent](signals)
        if silent in SILENT
        else Telemetry(registry=CollectorRegistry(), tracer_provider=signals.provider, spans=spans)
    )
    limiter: Any = ModelCallLimitMiddleware(run_limit=1, telemetry=telemetry)
    active = signals.provider.get_tracer("app").start_as_current_span("request")
    with active if silent == "active" else contextlib.nullcontext():
        assert limiter.before_model({"messages": []}, None) is None
        assert await limiter.abefore_model({"messages": []}, None) is None
    assert len(judged(signals)) == (2 if silent == "active" else 0)


class Alternating(Sampler):
    """Drops the first trace, keeps the second, and so on."""

    def __init__(self) -> None:
        self.keeps = True

    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        self.keeps = not self.keeps
        return SamplingResult(Sampling.RECORD_AND_SAMPLE if self.keeps else Sampling.DROP)

    def get_description(self) -> str:
        return "Alternating"


@limiters
@forms
async def test_a_run_is_sampled_as_a_whole(
    limiters: Limiters, form: str, signals: "Signals"
) -> None:
    """All spans of a run share the first one's sampling; an unsampled run has no exemplars."""
    provider = TracerProvider(sampler=ParentBased(Alternating()))
    provider.add_span_processor(SimpleSpanProcessor(signals.exporter))
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry, tracer_provider=provider)
    agent = agent_of(limiters(telemetry), again(["search", "ask"], ["search"], "done"))
    await run(agent, form=form)
    await resume(agent, form)
    assert judged(signals) == []
    assert exemplars(registry) == set()
    await run(agent, form=form)
    await resume(agent, form)
    assert_one_trace(judged(signals))
    assert len(judged(signals)) >= 2
    assert exemplars(registry) == {
        trace.format_trace_id(judged(signals)[0].context.trace_id),
    }


@limiters
@forms
async def test_a_trace_of_refusals(limiters: Limiters, form: str, signals: "Signals") -> None:
    """With `refused` the run's trace begins at its first refusal, and not before."""
    telemetry = Telemetry(
        registry=CollectorRegistry(), tracer_provider=signals.provider, spans="refused"
    )
    agent = agent_of(limiters(telemetry), again(["search", "ask"], ["search"], ["search"], "done"))
    await run(agent, form=form)
    assert judged(signals) == []
    assert await kept(agent) is None
    await resume(agent, form)
    spans = judged(signals)
    assert decisions(spans) == ["blocked", "blocked"]
    assert_one_trace(spans)
    assert (await kept(agent))["traceparent"].split("-")[1:3] == [
        trace.format_trace_id(spans[0].context.trace_id),
        trace.format_span_id(spans[0].context.span_id),
    ]


HOOKS = ("before_agent", "before_model", "wrap_model_call", "after_model")


@contextlib.contextmanager
def watching(seen: list[tuple[str, bool]], hook: str) -> Iterator[None]:
    before = otel.get_current()
    try:
        yield
    finally:
        seen.append((hook, otel.get_current() is before))


def watched(hook: Callable[..., Any], seen: list[tuple[str, bool]]) -> Callable[..., Any]:
    """The hook, noting whether it leaves the context as it was."""
    if inspect.iscoroutinefunction(hook):

        @wraps(hook)
        async def ahook(*args: Any, **kwargs: Any) -> Any:
            with watching(seen, hook.__name__):
                return await hook(*args, **kwargs)

        return ahook

    @wraps(hook)
    def plain(*args: Any, **kwargs: Any) -> Any:
        with watching(seen, hook.__name__):
            return hook(*args, **kwargs)

    return plain


CLASSES = (QuotaMiddleware, ModelCallLimitMiddleware, ToolCallLimitMiddleware)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Each hook that was called, and whether the context was the same afterwards."""
    noted: list[tuple[str, bool]] = []
    for cls in CLASSES:
        for name in (*HOOKS, *(f"a{hook}" for hook in HOOKS)):
            if name in cls.__dict__ or name in {"before_agent", "abefore_agent"}:
                monkeypatch.setattr(cls, name, watched(getattr(cls, name), noted))
    return noted


@pytest.mark.parametrize("active", [True, False], ids=["active", "none"])
@limiters
@all_forms
async def test_no_context_stays_attached(
    active: bool,  # noqa: FBT001 - a parameter of the test
    limiters: Limiters,
    form: str,
    signals: "Signals",
    seen: list[tuple[str, bool]],
) -> None:
    """Every hook leaves the current context as it found it."""
    agent = agent_of(limiters(signals.telemetry))
    request = signals.provider.get_tracer("app").start_as_current_span("request")
    with request if active else contextlib.nullcontext():
        await run(agent, form=form)
    prefix = "a" if form.startswith("a") else ""
    called = {hook for hook, _ in seen}
    assert called >= {f"{prefix}{hook}" for hook in ("before_agent", "after_model")}
    assert all(same for _, same in seen), seen
    assert len(judged(signals)) >= 3


def raising(telemetry: Telemetry) -> dict[str, Any]:
    tools = ToolCallLimit("search", run_limit=0, exit_behavior="error")
    model = ModelCallLimit(run_limit=0, exit_behavior="error")
    return {
        "quota after_model": QuotaMiddleware([tools], telemetry=telemetry),
        "quota before_model": QuotaMiddleware([model], telemetry=telemetry),
        "drop-in after_model": ToolCallLimitMiddleware(
            tool_name="search", run_limit=0, exit_behavior="error", telemetry=telemetry
        ),
        "drop-in before_model": ModelCallLimitMiddleware(
            run_limit=0, exit_behavior="error", telemetry=telemetry
        ),
    }


@pytest.mark.parametrize("active", [True, False], ids=["active", "none"])
@pytest.mark.parametrize("which", raising(Telemetry(registry=CollectorRegistry())))
@all_forms
async def test_no_context_stays_attached_by_a_hook_that_raises(
    active: bool,  # noqa: FBT001 - a parameter of the test
    which: str,
    form: str,
    signals: "Signals",
    seen: list[tuple[str, bool]],
) -> None:
    """A hook that ends the run with an exception leaves the context as it found it, too."""
    agent = agent_of([raising(signals.telemetry)[which]])
    request = signals.provider.get_tracer("app").start_as_current_span("request")
    before = otel.get_current()
    with request if active else contextlib.nullcontext():
        within = otel.get_current()
        with pytest.raises((ToolCallLimitExceededError, ModelCallLimitExceededError)):
            await run(agent, form=form)
        assert otel.get_current() is within
    assert otel.get_current() is before
    hook = ("a" if form.startswith("a") else "") + which.split()[1]
    assert seen[-1] == (hook, True)
    assert all(same for _, same in seen), seen
    assert decisions(judged(signals))[-1] == "blocked"


@pytest.mark.parametrize("limiters", [quota, stacked])
@forms
async def test_a_step_that_runs_again_begins_no_other_trace(
    limiters: Limiters, form: str, signals: "Signals", monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run goes on in its trace, even if the step that began the trace is lost."""
    broken = [OSError("the machine is tired")]

    def breaking(hook: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(hook):

            @wraps(hook)
            async def ahook(*args: Any, **kwargs: Any) -> Any:
                update = await hook(*args, **kwargs)
                if broken:
                    raise broken.pop()
                return update

            return ahook

        @wraps(hook)
        def plain(*args: Any, **kwargs: Any) -> Any:
            update = hook(*args, **kwargs)
            if broken:
                raise broken.pop()
            return update

        return plain

    for cls in (QuotaMiddleware, ModelCallLimitMiddleware):
        for name in ("before_model", "abefore_model"):
            monkeypatch.setattr(cls, name, breaking(cls.__dict__[name]))
    agent = agent_of(limiters(signals.telemetry))
    with pytest.raises(OSError, match="tired"):
        await run(agent, form=form)
    assert len(judged(signals)) == 1
    assert await kept(agent) is None
    await run(agent, None, form)
    assert not await in_mid_run(agent)
    assert len(judged(signals)) >= 5
    assert_one_trace(judged(signals))


@pytest.mark.parametrize("limiters", [quota, only_tools, stacked])
async def test_an_earlier_checkpoint_played_again(limiters: Limiters, signals: "Signals") -> None:
    """A replay from the middle of a run is in the run's trace."""
    agent = agent_of(limiters(signals.telemetry))
    await run(agent)
    first = judged(signals)[0]
    history = [each async for each in agent.aget_state_history(THREAD)]
    middle = next(each for each in history if each.next == ("tools",))
    signals.exporter.clear()
    await run(agent, None, config=middle.config)
    assert judged(signals)
    assert_below(judged(signals), first.context)

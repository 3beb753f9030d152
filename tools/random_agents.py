"""The random agents of `make compare`: each is drawn from its seed alone, played and recorded."""

import asyncio
import gc
import inspect
import logging
import random
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from decimal import Decimal
from functools import cache
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import (
    HumanInTheLoopMiddleware,
    ModelRetryMiddleware,
    ToolRetryMiddleware,
    after_agent,
    after_model,
    before_model,
)
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import StructuredTool, ToolException
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.prebuilt import tools_condition
from langgraph.types import Command, interrupt
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

import langchain_quota
from langchain_quota.errors import QuotaStoreError
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tools.compare import NOON, Frozen, frozen_loop, masked, plain

PLAYED: "list[Player]" = []
"""The agent that is played, for the tools. These are made once: it takes as long as an agent."""


class UnplayableError(Exception):
    """An edition has no such public name or option."""


def made(names: str, /, *args: Any, **options: Any) -> Any:
    """Make something public. It and an option may have several names, the newest first: `a|b`."""
    kind, known = _public(names)
    given = {}
    for option, value in options.items():
        name = next((each for each in option.split("|") if each in known), None)
        if name is None and "options" not in known:
            raise UnplayableError(f"{names}({option}=)")
        given[name or option] = value
    return kind(*args, **given)


@cache
def _public(names: str) -> tuple[Any, Any]:
    found = [each for each in names.split("|") if hasattr(langchain_quota, each)]
    if not found:
        raise UnplayableError(names)
    kind = getattr(langchain_quota, found[0])
    return kind, inspect.signature(kind).parameters


def _tool(name: str) -> StructuredTool:
    def run(how: str) -> str:
        PLAYED[0].note("results", f"{name} {how}")
        if how == "breaks" or (how == "fails" and name == "calc"):
            raise (ToolException if how == "fails" else ValueError)("the tool fails")
        return str(interrupt("what?")) if name == "ask" else how

    def call(how: str = "found") -> str:
        time.sleep(SECONDS.get(how, 0.2))
        return str(PLAYED[0].child.invoke(*ASKED)) if name == "delegate" else run(how)

    async def acall(how: str = "found") -> str:
        await asyncio.sleep(SECONDS.get(how, 0.2))
        return str(await PLAYED[0].child.ainvoke(*ASKED)) if name == "delegate" else run(how)

    about: Any = {"name": name, "description": name, "handle_tool_error": True}
    return StructuredTool.from_function(call, acall, **about)


SECONDS = {"slow": 0.7}
ASKED: Any = {"messages": [HumanMessage("go", id="asked")]}, {"recursion_limit": 30}
TOOLS = [*map(_tool, ("search", "calc", "ask", "delegate"))]


@before_model
def summarises(state: Any, runtime: Any) -> Any:
    if len(state["messages"]) % 8 == 7:
        raise ValueError("a middleware fails")
    new = [RemoveMessage(REMOVE_ALL_MESSAGES), HumanMessage("so far", id="summary")]
    return {"messages": new} if len(state["messages"]) > 4 else None


@after_model(can_jump_to=["model", "end"])
def refunds(state: Any, runtime: Any) -> Any:
    """Drop a call, jump back or end the run: what is charged and does not run is refunded."""
    last, way = state["messages"][-1], len(state["messages"]) % 7
    if way in {2, 4} and getattr(last, "tool_calls", None):
        return {"messages": [last.model_copy(update={"tool_calls": last.tool_calls[1:]})]}
    return {"jump_to": "model" if way == 3 else "end"} if way in {3, 6} else None


@after_agent(can_jump_to=["model"])
def goes_on(state: Any, runtime: Any) -> Any:
    return {"jump_to": "model"} if len(state["messages"]) % 3 == 2 else None


def _observe(decision: Any) -> None:
    if decision.outcome == "skipped":
        raise RuntimeError("an observer fails")


def _fail(*_: Any) -> Any:
    raise QuotaStoreError("the store is down")


USERS: list[Callable[[], Any]] = [
    *(lambda: summarises, lambda: refunds, lambda: refunds, lambda: goes_on),
    lambda: ModelRetryMiddleware(max_retries=1, on_failure="error"),
    lambda: ToolRetryMiddleware(max_retries=1, retry_on=(ValueError,)),
    lambda: HumanInTheLoopMiddleware({"calc": True}),
]
"""The middlewares of the user's."""
FORMS = ("Quota", "Quota", "Quota", "InlineQuota", "drop-in", "Graph")
NAMES = ("search", "search", ("search", "calc"), "ask")
ENDS = {"exit_behavior": ("end", "error", "finalize", "ask", "ask"), "near": (0.5, 1.0, (0.5, 0.9))}
TOOL = {"exit_behavior": ("end", "error", "ask", "ask"), "tool_name": NAMES}
TOKENS = {"tokens": ("input", "output"), "reserve": (20,)}
LIMITS: list[tuple[str, Any, dict[str, Any]]] = [
    *[("ToolCallLimit", 1, TOOL)] * 3,
    ("ToolCallLimit", 1, {"exclude": (("calc",),), "give_up_after": (1, 2)}),
    *[("ModelCallLimit", 1, ENDS)] * 2,
    ("TokenLimit", 25, ENDS | TOKENS),
    ("CostLimit", Decimal("0.0002"), ENDS | {"tool_prices": ({"search": "0.0001"},)}),
    ("TimeLimit", 0.4, ENDS | {"call_limit": (0.5,)}),
    ("ConcurrencyLimit", 0, {"tool_name": NAMES, "wait": (0, 0.3, 9)}),
    ("RepeatLimit", 0, {"key": (lambda call: call["name"],), "exit_behavior": ("end", "error")}),
]
"""The kinds of limits, the unit of each, and what some have."""
USUAL = {*vars(logging.makeLogRecord({})), "message", "taskName"}
PRICES = {"gpt-4o": made("Price", input=250, output=1000)}
DECISIONS = ({"type": "approve"}, {"type": "approve", "amount": 1}, {"type": "reject"})
MANAGED = ("left", "grant", "grant", "reset", "freeze", "thaw", "state")


class Player:
    """A random agent, and all that is seen of it, by field."""

    child: Any
    quota: Any = None
    limits: Any = ()

    def __init__(self, seed: int) -> None:
        self.record: dict[str, list[Any]] = {}
        self.r = r = random.Random(seed)
        self.mode, self.form = r.choice(("", "a", "a")), r.choice(FORMS)
        self.store = made("MemoryStore") if r.random() < 0.7 else None
        self.saver = InMemorySaver() if r.random() < 0.8 else None
        self.registry, self.exporter = CollectorRegistry(), InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def note(self, field: str, value: object) -> None:
        self.record.setdefault(field, []).append(plain(value))

    def some(self, odds: float, /, **choices: Any) -> dict[str, Any]:
        """Return some options, each with one of its values."""
        r = self.r
        return {name: r.choice(each) for name, each in choices.items() if r.random() < odds}

    def possible(self, draw: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Draw until the arguments go together; what an edition says of the others is noted."""
        while True:
            try:
                return draw(*args, **options)
            except (AssertionError, TypeError, ValueError) as error:
                self.note("arguments", error)

    def build(self) -> None:
        r, given = self.r, {"registry": self.registry, "tracer_provider": self.provider}
        given |= self.some(0.3, spans=("refused", "off"), near=(0.5,), run_histograms=(True,))
        given |= self.some(0.3, count_unchecked_calls=(True,))
        given |= self.some(0.7, subject_label=({"user_id": str, "whose": str},))
        self.telemetry = made("Telemetry", **given)
        tools = TOOLS[: r.choice((2, 3, 3, 4))]
        names = [each.name for each in tools] * 4 + ["invented"]
        answers = [self._answer(n, names) for n in range(r.randint(3, 9))]
        self.model: Any = ScriptedChatModel(
            script=lambda _: answers.pop(0) if answers else "done", model="gpt-4o"
        )
        if tools[-1].name == "delegate":
            self.child = self.possible(self._agent, "Quota", TOOLS[:2], name="child")
        named = {"name": r.choice((None, "agent", "agent")), "checkpointer": self.saver}
        self.agent = self.possible(self._agent, self.form, tools, **named)

    def _answer(self, n: int, names: Any) -> Any:
        r, calls = self.r, []
        for index in range(r.choice((0, 1, 1, 2, 2, 3, 4))):
            call_id = r.choice([f"call-{n}-{index}"] * 12 + [None, "", "same"])
            how = r.choice([None] * 8 + ["slow"] * 3 + ["fails"] * 4 + ["breaks"])
            call = {"name": r.choice(names), "args": {"how": how} if how else {}, "id": call_id}
            calls.append({**call, "type": "tool_call"})
        tokens = r.randint(1, 20)
        usage = {"input_tokens": tokens, "output_tokens": 5, "total_tokens": tokens + 5}
        some = self.some(0.8, id=(f"answer-{n}",), usage_metadata=(usage,))
        answer = AIMessage("" if calls else f"answer {n}", tool_calls=calls, **some)
        return answer if r.random() < 0.95 else ValueError("the provider fails")

    def _limit(self, name: str, kind: str, unit: Any, options: Any) -> Any:
        r, options = self.r, self.some(0.4, **options)
        if options.get("exit_behavior") == "ask" and not self.saver:
            del options["exit_behavior"]
        text = ("no more", lambda decision: decision.call.kind)
        options |= self.some(0.15, enforce=(False,), alert=(False,), message=text)
        if unit:
            runs = [n * unit for n in (1, 2, 3, 5, 8)], [lambda state, runtime: 2 * unit, 0]
            options |= self.some(0.7, run_limit=r.choice((runs[0],) * 4 + runs))
            options |= self.some(0.4, thread_limit=[n * unit for n in (3, 5, 9)])
            if options.get("exit_behavior") == "finalize" and kind != "ModelCallLimit":
                options["keep"] = unit
            if self.store and r.random() < 0.7:
                options["quotas"] = [self._quota(unit) for _ in range(r.choice((1, 1, 2)))]
                if unit in {1, 25} and any(each.window for each in options["quotas"]):
                    options |= self.some(0.5, wait=(0.5, 90))
        elif kind == "RepeatLimit":
            options["run_limit"] = r.choice((1, 2, 3))
        else:
            options["max_concurrency|at_once"] = r.choice((1, 1, 2))
        return made(kind, name=name, **options)

    def _quota(self, unit: Any) -> Any:
        pers = ("user_id", "user_id", "global", "agent", "thread", "root_run", "whose")
        per: Any = self.r.choice(pers)
        options = {} if per == "root_run" else self.some(0.7, window=("1m", "1m", "day"))
        options |= self.some(0.3, smooth=(True,), rollover=(unit,)) if options else {}
        of = (lambda state, runtime: "all") if per == "whose" else per
        return made("Quota", self.r.choice((1, 1, 2, 4)) * unit, per=of, name=per, **options)

    def _drop_in(self, kind: str) -> Any:
        options = self.some(0.3, exit_behavior=("end", "error"), limit_name=("mine",))
        options |= self.some(0.7, run_limit=(1, 2, 3, 5, 0), thread_limit=(2, 5, 9))
        if kind == "Tool":
            options |= self.some(0.5, tool_name=("search", "calc"), on_pending=("raise",))
        return made(f"{kind}CallLimitMiddleware", telemetry=self.telemetry, **options)

    def _agent(self, form: str, tools: Any, **agent: Any) -> Any:
        r, shared = self.r, {"telemetry": self.telemetry}
        middleware = [*dict.fromkeys(each() for each in USERS if r.random() < 0.15)]
        if form == "drop-in":
            middleware += [
                self._drop_in(r.choice(("Tool", "Tool", "Model"))) for _ in range(r.randint(1, 3))
            ]
        else:
            middleware += [self._drop_in("Tool") for _ in range(r.choice((0, 0, 1)))]
            kinds = [(f"limit-{n}", *r.choice(LIMITS)) for n in range(r.choice((1, 2, 2, 3, 4)))]
            self.limits = [self.possible(self._limit, *each) for each in kinds]
            named = {kind for _, kind, *_ in kinds}
            log = made("log_decisions", Lines("log"))
            shared |= self.some(0.5, on_decision=([log], [_observe, log]), tell_model=(True,))
            shared |= self.some(0.3, hide_exhausted=(True,), stream_events=(True,))
            if "CostLimit" in named:
                shared |= self.some(0.5, prices=(PRICES,), unknown_price=("allow",))
            if self.store:
                shared |= self.some(0.3, on_store_error=("allow",)) | {"store": self.store}
            if form == "Graph":
                return self._graph(tools, shared, **agent)
            if named & {"TokenLimit", "CostLimit"}:
                shared |= self.some(0.3, charge_all_models=(True,))
            self.quota = made(f"{form}Middleware", self.limits, **shared)
            middleware.append(self.quota)
        r.shuffle(middleware)
        agent |= self.some(0.15, interrupt_before=(["tools"],))
        return create_agent(self.model, tools, middleware=middleware, **agent)

    def _graph(self, tools: Any, shared: Any, *, name: Any, checkpointer: Any) -> Any:
        self.quota = made("GraphQuota", self.limits, name=name, **shared)
        model, graph = self.quota.model(self.model, tools), StateGraph(MessagesState)

        async def answer(state: Any) -> Any:
            return {"messages": [await model.ainvoke(state["messages"])]}

        node = RunnableLambda(lambda state: {"messages": [model.invoke(state["messages"])]}, answer)
        graph.add_node("model", node).add_node("tools", self.quota.tools(tools))
        graph.add_edge(START, "model").add_edge("tools", "model")
        graph.add_conditional_edges("model", tools_condition)
        return graph.compile(checkpointer)

    async def play(self) -> None:
        """Play turns, and what people do between them."""
        between = self._together, self._edit, self._manage, self._manage, self._later, self._outage
        for _ in range(self.r.randint(2, 4)):
            do: Any = self.r.choice((self._turn,) * 7 + between)
            with suppress(Exception):  # It is noted.
                await do(self.r.choice("0001"))
            if self.saver:
                self.note("messages", self.agent.get_state(_config("0")).values)

    async def _call(self, of: Any, name: str, *args: Any, **options: Any) -> None:
        """Call a method in the agent's mode, and note what it gives."""
        try:
            given = getattr(of, f"{self.mode}{name}")(*args, **options)
            if name == "stream":
                given = [each async for each in given] if self.mode else [*given]
            elif self.mode:
                given = await given
            self.note("stream" if name == "stream" else "results", [name, given])
        except Exception as error:
            self.note("results", [name, error])
            raise

    async def _turn(self, thread: str) -> None:
        r, config, user = self.r, _config(thread), self.r.choice(("ann", "ann", "bob"))
        asked: Any = {"messages": [HumanMessage("hi", id=f"hi-{r.random()}")]}
        answer = r.choice(("yes", *({"decisions": [each]} for each in DECISIONS)))
        how = self.some(0.3, stream_mode=(["updates", "custom"] if self.mode else "updates",))
        if self.saver and r.random() < 0.8:
            state = self.agent.get_state(config)
            waiting = [each.id for task in state.tasks for each in task.interrupts]
            asked = None if state.next else asked
            asked = Command(resume=dict.fromkeys(waiting, answer)) if waiting else asked

        async def app(_: Any, __: Any, send: Any) -> None:
            context = {"context": {"user_id": user}, **how}
            await self._call(self.agent, "stream" if how else "invoke", asked, config, **context)
            await send({"type": "http.response.start", "status": 200})

        async def send(message: Any) -> None:
            self.note("headers", message)

        served: Any = app
        if self.mode and self.store and any(each.quotas for each in self.limits):
            subject = {"subject": lambda scope: {"user_id": user}}
            served = made("QuotaHeadersMiddleware", app, quota=self.quota, **subject)
        tracer = self.provider.get_tracer("user")
        with tracer.start_as_current_span("request", record_exception=False):
            await served({"type": "http", "method": "POST", "path": "/"}, None, send)

    async def _together(self, _: str) -> None:
        if self.mode:
            await asyncio.gather(self._turn("0"), self._turn("1"), return_exceptions=True)

    async def _edit(self, thread: str) -> None:
        last = self.agent.get_state(_config(thread)).values["messages"][-1]
        calls = getattr(last, "tool_calls", [])
        by_hand = [ToolMessage("by hand", tool_call_id=str(call["id"])) for call in calls]
        fewer = last.model_copy(update={"tool_calls": calls[:1]})
        edit = self.r.choice(([HumanMessage("psst")], [RemoveMessage(last.id)], [fewer], by_hand))
        await self._call(self.agent, "update_state", _config(thread), {"messages": edit})

    async def _manage(self, thread: str) -> None:
        what, limit = self.r.choice(MANAGED), self.r.choice(self.limits)
        per = self.r.choice([each.name for each in limit.quotas] or ["thread"])
        names = {"user_id": "ann", "thread": thread, "agent": "agent", "whose": "all"}
        subject = {name: each for name, each in names.items() if name == per}
        of = {"grant": (limit.name, 2), "left": (limit.name,), "reset": (limit.name,)}
        if what == "state":
            await self._call(self.quota, "reset", self.agent, _config(thread))
        else:
            await self._call(self.quota, what, *of.get(what, ()), **subject)

    async def _later(self, _: str) -> None:
        time.sleep(self.r.choice((1, 20, 70, 90_000)))  # noqa: ASYNC251 - no time passes

    async def _outage(self, thread: str) -> None:
        down = dict.fromkeys(("acquire", "aacquire", "peek", "apeek"), _fail)
        vars(self.store).update(down)
        try:
            await self._turn(thread)
        finally:
            for name in down:
                del vars(self.store)[name]

    def finish(self) -> None:
        """Note what was sent to the model, the counts, the metrics and the spans."""
        self.note("messages", self.model.calls)
        uses = self.store.usages() if self.store else ()
        self.note("counts", sorted(map(plain, uses), key=masked))
        if self.saver and self.form != "Graph":
            state = self.agent.get_state(_config("0"))
            self.note("counts", langchain_quota.usage(state) if state.values else None)
        samples = [each for family in self.registry.collect() for each in family.samples]
        self.note("metrics", {f"{each.name} {each.labels}": each.value for each in samples})
        spans: Any = self.exporter.get_finished_spans()
        names = {span.context.span_id: span.name for span in spans}
        for span in spans:
            parent = span.parent and names.get(span.parent.span_id, "unknown")
            times = [each / 10**9 - NOON for each in (span.start_time, span.end_time)]
            events = [(each.name, each.attributes) for each in span.events]
            status = span.status.status_code.name, span.status.description
            self.note("spans", [span.name, parent, status, times, span.attributes, events])


def _config(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}, "recursion_limit": 30}


class Lines(logging.Handler):
    """Notes the lines of a log, with their fields."""

    def __init__(self, field: str) -> None:
        super().__init__()
        self.name = field

    def emit(self, record: logging.LogRecord) -> None:
        more = {key: value for key, value in vars(record).items() if key not in USUAL}
        PLAYED[0].note(str(self.name), [record.levelname, record.getMessage(), more])


def play(seed: int) -> dict[str, Any]:
    """Play an agent, and return what is seen of it, by field; all but its seed is as ever."""
    Frozen.passed, Frozen.numbers = 0.0, 0
    random.seed(seed)
    globals().pop("__warningregistry__", None)
    PLAYED[:] = [player := Player(seed)]
    logging.root.handlers[:] = [Lines("logs")]
    logging.getLogger("langchain_quota").setLevel(logging.DEBUG)
    with warnings.catch_warnings(record=True) as warned, captured_decisions() as decisions:
        warnings.simplefilter("always")
        try:
            player.build()
        except UnplayableError as error:
            return {"unplayable": str(error)}
        meter = made("QuotaMiddleware", [made("CostLimit", run_limit=1)])
        with getattr(meter, "receipt", nullcontext)() as bill:
            if player.mode:
                with asyncio.Runner(loop_factory=frozen_loop) as runner:
                    runner.run(player.play())
            else:
                with suppress(StopIteration):
                    player.play().send(None)
        gc.collect()
    player.finish()
    for field, value in (("receipt", bill and bill.as_dict()), ("decisions", decisions)):
        player.note(field, value)
    player.note("logs", [str(each.message) for each in warned])
    return player.record

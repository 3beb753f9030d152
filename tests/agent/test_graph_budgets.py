"""Budgets of tokens and money in graphs that are written by hand."""

import warnings
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, AnyMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.constants import END, START
from langgraph.func import entrypoint, task
from langgraph.graph import MessagesState, StateGraph, add_messages
from langgraph.prebuilt import ToolNode, create_react_agent
from langgraph.runtime import Runtime
from langgraph.types import Command, interrupt
from pydantic import BaseModel

from langchain_quota import (
    CostLimit,
    GraphQuota,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    Outcome,
    QuotaState,
    TokenLimit,
    ToolCallLimit,
    usage,
)
from langchain_quota.errors import UnknownPriceError
from langchain_quota.estimates import usage_bound
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.scene import CONFIG, Form, Scene, both_forms, recording
from tests.signals import Signals
from tests.stores import counts

TOTAL = "model.total_tokens"
MONEY = "model.microdollars"
THREAD_KEY = f"{TOTAL}:thread:thread-1"
ASKED: Any = {"messages": [("user", "hi")]}


def answer(tokens: int, *calls: str, text: str = "Hello.") -> AIMessage:
    """An answer that has cost so many tokens, one of them of output."""
    used: Any = {"input_tokens": tokens - 1, "output_tokens": 1, "total_tokens": tokens}
    called = [{"name": name, "args": {}, "id": f"{name}-{tokens}"} for name in calls]
    return AIMessage(text, usage_metadata=used, tool_calls=called)


def with_more(state: Any, more: Sequence[Any]) -> Any:
    return {**state, "messages": add_messages(state["messages"], [*more])}


def functional(quota: GraphQuota, call: Any, tools: ToolNode, saver: InMemorySaver) -> Any:
    """A loop in the functional API."""
    begin, before = task(quota.begin), task(quota.before_model)
    ask, after = task(call), task(quota.after_model)

    @entrypoint(checkpointer=saver)
    def agent(given: Any, *, previous: Any = None) -> Any:
        state = with_more(previous or {"messages": []}, given["messages"])
        state = begin(state).result()
        while (state := before(state).result())["jump_to"] != "end":
            state = after(with_more(state, [ask(state).result()])).result()
            if state["jump_to"] == "end":
                break
            if calls := quota.open_calls(state):
                state = with_more(state, tools.invoke(calls))
        return entrypoint.final(value=state, save=state)

    return agent


def async_functional(quota: GraphQuota, call: Any, tools: ToolNode, saver: InMemorySaver) -> Any:
    """The same, async."""
    begin, before = task(quota.abegin), task(quota.abefore_model)
    ask, after = task(call), task(quota.aafter_model)

    @entrypoint(checkpointer=saver)
    async def agent(given: Any, *, previous: Any = None) -> Any:
        state = with_more(previous or {"messages": []}, given["messages"])
        state = await begin(state)
        while (state := await before(state))["jump_to"] != "end":
            state = await after(with_more(state, [await ask(state)]))
            if state["jump_to"] == "end":
                break
            if calls := quota.open_calls(state):
                state = with_more(state, await tools.ainvoke(calls))
        return entrypoint.final(value=state, save=state)

    return agent


class Loop:
    """A loop on one thread, in one of the shapes that `GraphQuota` takes.

    Args:
        signals: The telemetry.
        shape: How the loop is written.
        script: What the model plays.
        limits: The limits.
        form: Which form of the nodes runs.
        tools: The tools.
        saver: Keeps the thread.
        model: The model's class.
        **options: Further arguments of `GraphQuota`.
    """

    def __init__(
        self,
        signals: Signals,
        shape: str,
        script: Any,
        *limits: Limit,
        form: Form = "async",
        tools: Sequence[BaseTool] | None = None,
        saver: InMemorySaver | None = None,
        model: type[ScriptedChatModel] = ScriptedChatModel,
        **options: Any,
    ) -> None:
        self.form = form
        self.ran: list[str] = []
        self.tools = tools or [recording("search", self.ran)]
        self.model = model(script=script)
        self.quota = GraphQuota(limits, telemetry=signals.telemetry, **options)
        self.saver = saver or InMemorySaver()
        self.app: Any = {
            "chat model": self._of_chat_model,
            "call_model": self._of_node(by_call_model=True),
            "own calls": self._of_node(by_call_model=False),
            "functional": self._functional(by_call_model=True),
            "functional, own calls": self._functional(by_call_model=False),
            "react": self._react,
            "hooks alone": self._hooks_alone,
        }[shape]()

    def _compiled(self, graph: StateGraph[Any, Any, Any, Any]) -> Any:
        return graph.compile(checkpointer=self.saver)

    def _of_chat_model(self) -> Any:
        graph = StateGraph(MessagesState)
        return self._compiled(self.quota.add_to(graph, model=self.model, tools=self.tools))

    def _of_node(self, *, by_call_model: bool) -> Callable[[], Any]:
        bound = self.model.bind_tools(self.tools)

        def node(state: MessagesState) -> Any:
            if by_call_model:
                return {"messages": [self.quota.call_model(self.model, state, self.tools)]}
            return {"messages": [bound.invoke(state["messages"])]}

        async def anode(state: MessagesState) -> Any:
            if by_call_model:
                said = await self.quota.acall_model(self.model, state, self.tools)
                return {"messages": [said]}
            return {"messages": [await bound.ainvoke(state["messages"])]}

        def build() -> Any:
            model: Any = node if self.form == "sync" else anode
            return self._compiled(
                self.quota.add_to(StateGraph(MessagesState), model=model, tools=self.tools)
            )

        return build

    def _functional(self, *, by_call_model: bool) -> Callable[[], Any]:
        bound = self.model.bind_tools(self.tools)

        def call(state: Any) -> AIMessage:
            if by_call_model:
                return self.quota.call_model(self.model, state, self.tools)
            return bound.invoke(state["messages"])

        async def acall(state: Any) -> AIMessage:
            if by_call_model:
                return await self.quota.acall_model(self.model, state, self.tools)
            return await bound.ainvoke(state["messages"])

        def build() -> Any:
            tools = ToolNode(self.tools)
            if self.form == "sync":
                return functional(self.quota, call, tools, self.saver)
            return async_functional(self.quota, acall, tools, self.saver)

        return build

    def _react(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return create_react_agent(
                **self.quota.react_hooks(self.model, self.tools), checkpointer=self.saver
            )

    def _hooks_alone(self) -> Any:
        hooks = self.quota.react_hooks()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            agent = create_react_agent(self.model, self.tools, **hooks)
        around = StateGraph(hooks["state_schema"])
        around.add_node("agent", agent)
        around.add_edge(START, "agent")
        return self._compiled(around)

    async def play(self, given: Any = None) -> Any:
        asked = given or {"messages": [("user", "hi")]}
        if self.form == "sync":
            return self.app.invoke(asked, CONFIG)
        return await self.app.ainvoke(asked, CONFIG)

    def spent(self, counter: str = TOTAL) -> tuple[int, int]:
        """What the thread and its newest run have used."""
        used = usage(self.app.get_state(CONFIG))
        return used.spent.get(counter, 0), used.run_spent.get(counter, 0)

    def last(self) -> str:
        return str(self.app.get_state(CONFIG).values["messages"][-1].text)


SHAPES = (
    "chat model",
    "call_model",
    "own calls",
    "functional",
    "functional, own calls",
    "react",
    "hooks alone",
)
shapes = pytest.mark.parametrize("shape", SHAPES)


@both_forms
@shapes
@pytest.mark.parametrize("has_store", [False, True])
async def test_a_loop_is_charged(
    signals: Signals, shape: str, form: Form, *, has_store: bool
) -> None:
    """However the loop is written, each call is charged once, and runs and threads end exactly."""
    script = [answer(60, "search"), answer(45, "search"), answer(7), answer(90), answer(1)]
    store = MemoryStore() if has_store else None
    limit = TokenLimit(run_limit=100, thread_limit=202)
    loop = Loop(signals, shape, script, limit, form=form, store=store)

    await loop.play()

    assert len(loop.model.calls) == 2
    assert loop.spent() == (105, 105)
    assert loop.last() == "Token limits exceeded: run limit (105/100 tokens)"

    await loop.play()
    assert loop.spent() == (112, 7)
    await loop.play()
    assert loop.spent() == (202, 90)
    await loop.play()

    assert loop.spent() == (202, 0)
    assert loop.last() == "Token limits exceeded: thread limit (202/202 tokens)"
    assert loop.ran == ["search"] * 2
    if store is not None:
        assert counts(store)[THREAD_KEY] == 202


@shapes
async def test_a_budget_on_trial_counts_each_call_once(signals: Signals, shape: str) -> None:
    """However the loop is written, a call beyond a budget on trial is `would_block`, once."""
    script = [answer(60, "search"), answer(45, "search"), answer(7, "search"), answer(9)]
    loop = Loop(signals, shape, script, TokenLimit(run_limit=100, enforce=False))

    await loop.play()

    assert loop.spent() == (121, 121)
    name, limit = "langchain_quota_limit_decisions_total", {"agent": "unnamed", "limit": "tokens"}
    assert signals.value(name, **limit, scope="none", decision="allowed") == 2
    assert signals.value(name, **limit, scope="run", decision="would_block") == 2


@shapes
async def test_money(signals: Signals, shape: str) -> None:
    """Costs are charged by the prices given, and shown in dollars."""
    loop = Loop(
        signals,
        shape,
        [answer(60, "search"), answer(40, "search")],
        CostLimit(run_limit="0.50"),
        prices=lambda used: {60: Decimal("0.0000001"), 40: Decimal("0.5")}.get(
            used.total_tokens, Decimal(0)
        ),
    )

    await loop.play()

    assert loop.spent(MONEY) == (500_001, 500_001)
    assert loop.last() == "Cost limits exceeded: run limit ($0.500001/$0.50)"


@shapes
async def test_an_exception(signals: Signals, shape: str) -> None:
    """With `"error"` the exception comes out of the loop, with the counts in tokens."""
    limit = TokenLimit(run_limit=50, exit_behavior="error")
    loop = Loop(signals, shape, [answer(60, "search")], limit)

    with pytest.raises(ModelCallLimitExceededError, match="60/50 tokens"):
        await loop.play()


@both_forms
@shapes
@pytest.mark.parametrize("has_store", [False, True])
async def test_a_reserve_is_never_exceeded(
    signals: Signals, shape: str, form: Form, *, has_store: bool
) -> None:
    """A call that could exceed the budget by its reserve is refused; what is held is given back."""
    store = MemoryStore() if has_store else None
    limit = TokenLimit(thread_limit=100, reserve=50)
    script = [answer(30, "search"), answer(21, "search"), answer(50)]
    loop = Loop(signals, shape, script, limit, form=form, store=store)

    await loop.play()

    assert loop.spent() == (51, 51)
    assert loop.last() == (
        "Token limits exceeded: thread limit (51/100 tokens, the call may need 50)"
    )
    if store is not None:
        assert counts(store)[THREAD_KEY] == 51


BOUNDED = ("chat model", "call_model", "functional", "react")
"""The shapes in which a function `reserve` sees the request."""
UNSEEN = ("hooks alone", "functional, own calls")
"""The shapes in which nobody sees the call."""


@both_forms
@pytest.mark.parametrize("shape", BOUNDED)
@pytest.mark.parametrize("has_store", [False, True])
async def test_a_reserve_of_the_request(
    signals: Signals, shape: str, form: Form, *, has_store: bool
) -> None:
    """A function says what each call can use: it sees its tools, and a refused call is not made."""
    store = MemoryStore() if has_store else None
    seen: list[int] = []

    def reserve(request: Any) -> int:
        seen.append(len(request.tools))
        return 60

    limit = TokenLimit(thread_limit=100, reserve=reserve)
    script = [answer(40, "search"), answer(5, "search")]
    loop = Loop(signals, shape, script, limit, form=form, store=store)

    with captured_decisions() as decisions:
        await loop.play()

    assert loop.spent() == (45, 45)
    assert seen == [1, 1, 1]
    assert loop.last() == (
        "Token limits exceeded: thread limit (45/100 tokens, the call may need 60)"
    )
    assert [each.outcome for each in decisions if each.call.kind == "model"][-1] is Outcome.BLOCKED
    if store is not None:
        assert counts(store)[THREAD_KEY] == 45


async def test_what_nobody_sees_is_an_error(signals: Signals) -> None:
    """A function `reserve` needs the request: hooks alone are refused, a node's own call raises."""
    limit = TokenLimit(run_limit=100, reserve=usage_bound, name="mine")
    with pytest.raises(ValueError, match=r"limit 'mine' has a reserve .* react_hooks\(model"):
        Loop(signals, "hooks alone", [], limit)

    loop = Loop(signals, "own calls", [answer(60, "search"), answer(1)], limit)
    with pytest.raises(RuntimeError, match=r"quota\.call_model"):
        await loop.play()

    with pytest.raises(RuntimeError, match=r"quota\.call_model"):
        await loop.play()
    assert loop.spent() == (60, 0)


@shapes
async def test_an_unknown_price(signals: Signals, shape: str) -> None:
    """A model without a price is an error: before its first call, unless nobody sees the call."""
    loop = Loop(
        signals,
        shape,
        [answer(60, "search"), answer(1)],
        CostLimit(run_limit=1),
        prices=lambda _: None,
    )

    with pytest.raises(UnknownPriceError):
        await loop.play()

    assert len(loop.model.calls) == (1 if shape in UNSEEN else 0)


@both_forms
@shapes
async def test_an_interrupt(signals: Signals, shape: str, form: Form) -> None:
    """A resume charges nothing twice, also in another process with another middleware."""
    store, saver = MemoryStore(), InMemorySaver()

    def loop_of(*script: Any) -> Loop:
        tools = [recording("ask", [], lambda: interrupt("Sure?"))]
        limit = TokenLimit(run_limit=100, thread_limit=1000)
        return Loop(signals, shape, script, limit, form=form, tools=tools, saver=saver, store=store)

    await loop_of(answer(60, "ask")).play()
    loop = loop_of(answer(45, "ask"))
    await loop.play(Command(resume="yes"))
    loop = loop_of(answer(1))
    await loop.play(Command(resume="yes"))

    assert loop.spent() == (105, 105)
    assert loop.last() == "Token limits exceeded: run limit (105/100 tokens)"
    assert counts(store)[THREAD_KEY] == 105


class Notes(BaseModel):
    """A state of the user's own."""

    messages: Annotated[list[AnyMessage], add_messages]


class Asked(TypedDict):
    """What a node asks for: less than the graph has, and nothing of ours."""

    question: str


class Questions(MessagesState):
    question: str


def node_of(
    signals: Signals,
    script: Any,
    node: Callable[[ScriptedChatModel, GraphQuota], Any],
    *limits: Limit,
    state: Any = MessagesState,
    form: Form = "async",
    **options: Any,
) -> Scene:
    """A loop with a model's node of the user's own."""
    return Scene(
        signals,
        script,
        limits,
        form=form,
        state=state,
        loop=lambda scene: {"model": node(scene.model, scene.quota)},
        **options,
        kind="graph",
    )


def spent(scene: Scene, counter: str = TOTAL) -> tuple[int, int]:
    used = usage(scene.agent.get_state(CONFIG))
    return used.spent.get(counter, 0), used.run_spent.get(counter, 0)


def of_a_class(model: ScriptedChatModel, _quota: GraphQuota) -> Any:
    def node(state: Notes) -> dict[str, Any]:
        assert isinstance(state, Notes)
        return {"messages": [model.invoke(state.messages)]}

    return node


def of_what_langgraph_gives(model: ScriptedChatModel, _quota: GraphQuota) -> Any:
    def node(state: MessagesState, config: RunnableConfig, runtime: Runtime[Any]) -> Any:
        assert runtime.execution_info is not None
        return {"messages": model.invoke(state["messages"], config)}

    return node


def by_command(model: ScriptedChatModel, _quota: GraphQuota) -> Any:
    async def node(state: MessagesState) -> Command[Any]:
        return Command(update={"messages": [await model.ainvoke(state["messages"])]})

    return node


def by_list(model: ScriptedChatModel, _quota: GraphQuota) -> Any:
    def node(state: MessagesState) -> Any:
        return [Command(update={"messages": [model.invoke(state["messages"])]})]

    return node


def in_a_runnable(model: ScriptedChatModel, quota: GraphQuota) -> Any:
    """Callbacks of the node are handed on to `call_model` here."""
    return RunnableLambda(
        lambda state: {"messages": [quota.call_model(model, state)]}, name="answer"
    )


def of_less(model: ScriptedChatModel, _quota: GraphQuota) -> Any:
    def node(state: Asked) -> Any:
        assert "messages" not in state
        return {"messages": [model.invoke("Hi!")]}

    return node


@both_forms
@pytest.mark.parametrize(
    ("node", "state"),
    [
        (of_a_class, Notes),
        (of_a_class, MessagesState),
        (of_what_langgraph_gives, MessagesState),
        (by_list, MessagesState),
        (in_a_runnable, MessagesState),
        (of_less, Questions),
    ],
)
async def test_a_node_of_the_users_own(signals: Signals, form: Form, node: Any, state: Any) -> None:
    """The user's node gets the state that it asks for, and its calls are charged once."""
    script = [answer(60, "search"), answer(45, "search")]
    # The functions of a limit see the graph's state, whatever the node asks for.
    limit = TokenLimit(run_limit=lambda state, _runtime: 100 if state["messages"] else 0)
    scene = node_of(signals, script, node, limit, state=state, form=form)

    await scene.play()

    assert spent(scene) == (105, 105)
    assert len(scene.model.calls) == 2


async def test_a_node_that_goes_on_by_itself(signals: Signals) -> None:
    """A node that writes by a `Command` is charged in its own checkpoint, too."""
    script = [answer(60, "search"), answer(45, "search")]
    scene = node_of(
        signals,
        script,
        by_command,
        TokenLimit(run_limit=100),
        interrupt_after=["model"],
    )

    await scene.play()

    assert spent(scene) == (60, 60)

    await scene.go_on()
    await scene.go_on()

    assert spent(scene) == (105, 105)


@both_forms
@pytest.mark.parametrize("in_chain", [False, True])
@pytest.mark.parametrize("has_store", [False, True])
async def test_a_node_that_calls_several_models(
    signals: Signals, form: Form, *, in_chain: bool, has_store: bool
) -> None:
    """What it calls by `call_model` and what it calls by itself is charged, each once."""
    store = MemoryStore() if has_store else None

    def node(model: ScriptedChatModel, quota: GraphQuota) -> Any:
        summary = ScriptedChatModel(script=[answer(7)])
        chain: Any = RunnableLambda(summary.invoke)

        def call(state: QuotaState[Any]) -> Any:
            (chain if in_chain else summary).invoke("Sum it up!")
            quota.call_model(model, state)
            return {"messages": [quota.call_model(model, state)]}

        return call

    limit = TokenLimit(thread_limit=1000, reserve=lambda _: 100)
    script = [answer(60), answer(40)]
    scene = node_of(signals, script, node, limit, form=form, store=store)

    await scene.play()

    assert spent(scene) == (107, 107)
    if store is not None:
        assert counts(store)[THREAD_KEY] == 107


async def test_loops_of_one_graph_have_one_budget(signals: Signals) -> None:
    """What the first loop has used the second one has not."""
    quota = GraphQuota([TokenLimit(run_limit=100)], telemetry=signals.telemetry)
    first, second = (ScriptedChatModel(script=[answer(60)]) for _ in range(2))
    third = ScriptedChatModel(script=[])
    graph = StateGraph(MessagesState)
    for name, model, start, end in (
        ("planner", first, START, "writer.quota.before_agent"),
        ("writer", second, None, "reader.quota.before_agent"),
        ("reader", third, None, END),
    ):
        quota.add_to(graph, model=model, tools=[], name=name, start=start, end=end)
    app: Any = graph.compile(checkpointer=InMemorySaver())

    result = await app.ainvoke(ASKED, CONFIG)

    assert usage(app.get_state(CONFIG)).run_spent == {TOTAL: 120}
    assert result["messages"][-1].text == "Token limits exceeded: run limit (120/100 tokens)"
    assert len(first.calls) == len(second.calls) == 1


@shapes
async def test_beside_other_limits(signals: Signals, shape: str) -> None:
    """One list may have limits of calls and of tokens: each counts its own."""
    limits: list[Limit] = [
        ModelCallLimit(run_limit=9),
        ToolCallLimit("search", run_limit=1),
        TokenLimit(run_limit=1000),
    ]
    loop = Loop(signals, shape, [answer(60, "search"), answer(45, "search"), answer(5)], *limits)

    await loop.play()

    used = usage(loop.app.get_state(CONFIG))
    assert (used.model, used.tools, used.spent) == (3, {"search": 1}, {TOTAL: 110})

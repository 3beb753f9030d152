"""The nodes and edges that put a loop of model and tools, with its limits, into a StateGraph."""

import operator
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypedDict, get_type_hints

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableBinding, RunnableLambda
from langchain_core.tools import BaseTool
from langgraph.channels import BinaryOperatorAggregate, LastValue
from langgraph.graph import StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel
from langgraph.types import Command, Send

from langchain_quota.features.graph.charges import joined
from langchain_quota.features.graph.loop import (
    CALLED,
    Loop,
    Prompt,
    State,
    Tools,
    merged,
    open_calls,
)
from langchain_quota.features.graph.own_node import ChargedNode
from langchain_quota.middleware._calls import Update
from langchain_quota.middleware._context import running_config
from langchain_quota.middleware._form import Form, forms, now
from langchain_quota.state import (
    LEDGER,
    RUN_MODEL,
    RUN_TOOLS,
    THREAD_MODEL,
    THREAD_TOOLS,
    Ledger,
    QuotaState,
    ledger,
)

_KEPT = (LEDGER, RUN_MODEL, RUN_TOOLS, THREAD_MODEL, THREAD_TOOLS)
"""The keys of the state that are ours."""


class Nodes:
    """The nodes and edges of one loop."""

    def __init__(
        self, loop: Loop, graph: StateGraph[Any, Any, Any, Any], *, name: str | None, end: str
    ) -> None:
        _check_graph(graph)
        if name is not None and (not isinstance(name, str) or not name):
            raise TypeError(f"name must be a name or None, not {name!r}")
        if not isinstance(end, str) or not end:
            raise TypeError(f"end must be the name of a node, or END, not {end!r}")
        prefix = "" if name is None else f"{name}."
        self._loop = loop
        self._graph = graph
        self._name = name
        self._end = end
        self._begin = f"{prefix}{loop.name}.before_agent"
        self._before = f"{prefix}{loop.name}.before_model"
        self._after = f"{prefix}{loop.name}.after_model"
        self._model = f"{prefix}model"
        self._tools = f"{prefix}tools"
        for each in (self._begin, self._before, self._model, self._after, self._tools):
            if each in graph.nodes:
                raise ValueError(
                    f"the graph has a node {each!r} already: add_to adds it. Give the loop a name "
                    "for a second one in a graph: add_to(…, name=…)"
                )

    def add(self, model: Any, tools: Tools | ToolNode, *, prompt: Prompt, start: Any) -> None:
        """Add the nodes, and the edges between them."""
        if start is not None and (not isinstance(start, str) or not start):
            raise TypeError(f"start must be the name of a node, START or None, not {start!r}")
        tool_node, offered = _tools(self._loop, tools)
        graph, labelled = self._graph, self._labelled()
        own: dict[str, Any] = {"input_schema": _schema(graph), **labelled}
        if isinstance(model, BaseChatModel):
            model_node, of_model = self._calling(model, offered, prompt), own
        else:
            _check_node(model, prompt)
            model_node, of_model = self._own(model)
            of_model |= labelled
        begin = RunnableLambda(self._loop.begin_once, self._loop.abegin_once, name=self._begin)
        before = RunnableLambda(self._judge_model, self._ajudge_model, name=self._before)
        after = RunnableLambda(self._judge_tools, self._ajudge_tools, name=self._after)
        after_goes_to = (self._tools, self._before, self._end)
        graph.add_node(self._begin, begin, **own)
        graph.add_node(self._before, before, destinations=(self._model, self._end), **own)
        graph.add_node(self._model, model_node, **of_model)
        graph.add_node(self._after, after, destinations=after_goes_to, **own)
        graph.add_node(self._tools, tool_node, **labelled)
        graph.add_edge(self._begin, self._before)
        graph.add_edge(self._model, self._after)
        direct = [each.name for each in tool_node.tools_by_name.values() if each.return_direct]
        if direct:
            graph.add_conditional_edges(
                self._tools, self._behind_tools(direct), [self._before, self._end]
            )
        else:
            graph.add_edge(self._tools, self._before)
        if start is not None:
            graph.add_edge(start, self._begin)

    def _labelled(self) -> dict[str, Any]:
        """The metadata from which telemetry reads the agent's name, as `create_agent` sets it."""
        return {} if self._name is None else {"metadata": {"lc_agent_name": self._name}}

    def _calling(self, model: BaseChatModel, tools: Tools, prompt: Prompt) -> Runnable[Any, Any]:
        """The node that calls a chat model."""

        def said(message: Any, charged: Update) -> Update:
            if self._name is not None:
                message.name = self._name
            return joined({"messages": [message], **charged}, CALLED)

        def call(state: State) -> Update:
            self._check_admitted(state)
            return said(*now(self._loop.ask("", model, state, tools, prompt)))

        async def acall(state: State) -> Update:
            self._check_admitted(state)
            return said(*await self._loop.ask("a", model, state, tools, prompt))

        return RunnableLambda(call, acall, name=self._model)

    def _own(self, model: Any) -> tuple[Any, dict[str, Any]]:
        """The model node of the user's own, and the arguments of `add_node` for it."""
        # The node gets the state that it asks for: a mapping also has our counts, a class does not.
        spec = StateGraph(self._graph.state_schema).add_node("model", model).nodes["model"]
        asked: Any = spec.input_schema
        hints = get_type_hints(asked, include_extras=True)
        own: Any = spec.runnable
        keys = {*hints, *_KEPT}

        def given(state: State) -> Any:
            self._check_admitted(state)
            return _as_schema(asked, {key: each for key, each in state.items() if key in keys})

        schema = _schema(self._graph, hints)
        destinations = spec.ends or None
        node = ChargedNode(self._loop, own, given)
        return node, {"input_schema": schema, "destinations": destinations}

    def _behind_tools(self, direct: Collection[str]) -> Callable[[Any], str]:
        """Where the loop goes after the tools, some of which return directly."""

        def behind_tools(state: Any) -> str:
            messages = state["messages"] if isinstance(state, Mapping) else state.messages
            asked = next((each for each in reversed(messages) if isinstance(each, AIMessage)), None)
            calls = [] if asked is None else asked.tool_calls
            ends = bool(calls) and all(call["name"] in direct for call in calls)
            return self._end if ends else self._before

        return behind_tools

    async def _judging_model(self, form: Form, state: State) -> Command[Any]:
        return self._to_model(await self._loop.judge_model(form, state))

    _judge_model, _ajudge_model = forms(_judging_model)

    async def _judging_tools(self, form: Form, state: State) -> Command[Any]:
        return self._to_tools(state, await self._loop.judge_tools(form, state))

    _judge_tools, _ajudge_tools = forms(_judging_tools)

    def _to_model(self, update: Update) -> Command[Any]:
        is_admitted = update.pop("jump_to") == "model"
        update = joined(update, {LEDGER: Ledger(admitted=self._model if is_admitted else None)})
        return Command(update=update, goto=self._model if is_admitted else self._end)

    def _check_admitted(self, state: State) -> None:
        """Check that the model's call was judged."""
        if self._loop.on_trial:
            return
        # A `Send` gives its node a state of its own, which may say anything.
        path: Any = (running_config().get("metadata") or {}).get("langgraph_path") or ()
        if ledger(state).get("admitted") != self._model or "__pregel_push" in path:
            raise RuntimeError(
                f"the node {self._model!r} was about to call its model, and no limit has judged "
                f"the call: the graph leads to {self._model!r} past {self._before!r}. Lead it to "
                f"{self._begin!r} instead. If a node of yours reads the model's answer and may ask "
                "again, give it as the loop's end: add_to(…, end='its name')"
            )

    def _to_tools(self, state: State, update: Update) -> Command[Any]:
        jump = update.pop("jump_to")
        if jump != "tools":
            return Command(update=update, goto=self._end if jump == "end" else self._before)
        after = merged(state, update)
        given = _as_schema(self._graph.state_schema, after)
        # One task for each call: an interrupt in one tool does not make the others run again.
        # This is how a ToolNode takes a call with the state that its tool may ask for.
        kind = {"__type": "tool_call_with_context", "state": given}
        sends = [Send(self._tools, {**kind, "tool_call": call}) for call in open_calls(after)]
        return Command(update=update, goto=sends)


def check_model(model: Any) -> None:
    """Check that something is a chat model without tools."""
    if not isinstance(model, BaseChatModel):
        bound = " with tools bound: give the model itself, tools= has the tools"
        kind = f"a {type(model).__name__}"
        raise TypeError(
            f"model must be a chat model, not {kind}{bound if _is_bound(model) else ''}"
        )


def _check_node(model: Any, prompt: Prompt) -> None:
    """Check that something can be the model's node."""
    if _is_bound(model):
        check_model(model)
    if isinstance(model, Pregel) or not (callable(model) or isinstance(model, Runnable)):
        raise TypeError(
            "model must be a chat model, or the model's node: a function or a Runnable from the "
            f"state to an update with its message, not a {type(model).__name__}"
        )
    if prompt is not None:
        raise TypeError("prompt is for a chat model: a node of your own has its own prompt")


def _is_bound(model: Any) -> bool:
    return isinstance(model, RunnableBinding) and isinstance(model.bound, BaseChatModel)


def _check_graph(graph: Any) -> None:
    """Check that a loop can be added to a graph."""
    if not isinstance(graph, StateGraph):
        compiled = ", but a compiled one" if isinstance(graph, Pregel) else ""
        raise TypeError(
            f"graph must be a StateGraph{compiled or f', not {graph!r}'}: call add_to before "
            "compile()"
        )
    if graph.compiled:
        raise TypeError("graph is compiled already: call add_to before compile()")
    remedy = "messages: Annotated[list[AnyMessage], add_messages], as MessagesState has it"
    channel = graph.channels.get("messages")
    if channel is None:
        raise ValueError(f"the graph's state has no messages: it needs {remedy}")
    adds_up = isinstance(channel, BinaryOperatorAggregate) and channel.operator is operator.add
    if adds_up or isinstance(channel, LastValue):
        raise ValueError(f"the graph's state does not keep messages by their id: it needs {remedy}")


def _tools(loop: Loop, tools: Any) -> tuple[ToolNode, list[Any]]:
    """The node of the tools, and the tools that the model is offered, with a provider's own."""
    if isinstance(tools, ToolNode):
        loop.check_holds(tools)
        return tools, list(tools.tools_by_name.values())
    if isinstance(tools, str | Mapping | BaseTool) or not hasattr(tools, "__iter__"):
        raise TypeError(
            f"tools must be a list of tools or a ToolNode, not a {type(tools).__name__}"
        )
    given = list(tools)
    node = loop.tool_node(given)
    builtin = [each for each in given if isinstance(each, dict)]
    return node, [*node.tools_by_name.values(), *builtin]


def _schema(
    graph: StateGraph[Any, Any, Any, Any], others: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """All of the graph's state, and our counts: a node that reads them adds their channels."""
    # They are then neither in the input nor in the output of the graph.
    # A key without a reducer here takes the graph's reducer.
    keys: dict[str, Any] = dict.fromkeys(graph.channels, Any)
    managed = {key: Annotated[Any, each] for key, each in graph.managed.items()}
    return _with_counts({**keys, **managed, **others})


def _with_counts(keys: Mapping[str, Any]) -> Any:
    hints = get_type_hints(QuotaState, include_extras=True)
    return TypedDict("State", {**keys, **{key: hints[key] for key in _KEPT}})  # type: ignore[operator]


def _is_mapping(schema: Any) -> bool:
    """Whether a graph gives its state to nodes as a dictionary."""
    return not isinstance(schema, type) or issubclass(schema, dict)


def _as_schema(schema: Any, state: dict[str, Any]) -> Any:
    """The state as the tools of a graph get it: of the class that the graph has."""
    if _is_mapping(schema):
        return state
    return schema(**{key: state[key] for key in get_type_hints(schema) if key in state})

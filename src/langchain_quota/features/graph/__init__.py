"""GraphQuota: limits for graphs that are written by hand, without create_agent."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain.chat_models import init_chat_model
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, SystemMessage, ToolCall
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langgraph.constants import END, START
from langgraph.graph import StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel

from langchain_quota.arguments import one_list
from langchain_quota.features.budgets.prices import Price, Prices, UnknownPrice
from langchain_quota.features.graph.loop import (
    Loop,
    State,
    Tools,
    identified_state,
    merged,
    open_calls,
)
from langchain_quota.features.graph.nodes import Nodes, check_model
from langchain_quota.features.graph.react import ReactHooks, ReactModel, ReactState
from langchain_quota.features.root_run.run import watch_root_runs
from langchain_quota.limits import Limit
from langchain_quota.middleware._form import now
from langchain_quota.middleware._observers import Observer
from langchain_quota.resolved import Outage
from langchain_quota.state import RUN_MODEL, RUN_TOOLS
from langchain_quota.stores import QuotaStore
from langchain_quota.telemetry import Telemetry


class GraphQuota:
    """Puts many limits on a graph that is written by hand, and makes every call visible.

    It replaces `QuotaMiddleware` where `create_agent` is not used: in a `StateGraph` with a
    `ToolNode` (`add_to`), in the functional API (`begin` and the methods below it), and in
    `create_react_agent` and `create_supervisor` (`react_hooks`). Limits, counts, messages,
    exceptions and telemetry are the same. A run is one invocation of the outermost graph; loops of
    one graph count together.

    A `reserve` that is a number is held from `before_model` on, because the library may never see
    the request. If a run stops before its model call, the number stays held for 15 minutes.

    Args:
        limits: The limits, at least one, each under a name of its own.
        tell_model: As in `QuotaMiddleware`.
        hide_exhausted: As in `QuotaMiddleware`.
        on_decision: As in `QuotaMiddleware`.
        store: As in `QuotaMiddleware`.
        on_store_error: As in `QuotaMiddleware`.
        prices: As in `QuotaMiddleware`.
        unknown_price: As in `QuotaMiddleware`.
        telemetry: As in `QuotaMiddleware`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no limit, or arguments do not go together; see `QuotaMiddleware`.

    Examples:
        >>> from langgraph.graph import MessagesState, StateGraph
        >>> from langchain_quota import GraphQuota, ModelCallLimit, ToolCallLimit
        >>> from langchain_quota.testing import ScriptedChatModel
        >>> def search(query: str = "") -> str:
        ...     "Search the web."
        ...     return "nothing found"
        >>> model = ScriptedChatModel(script=[["search", "search"], "That is all I found."])
        >>> quota = GraphQuota([ModelCallLimit(run_limit=10), ToolCallLimit("search", run_limit=1)])
        >>> graph = quota.add_to(StateGraph(MessagesState), model=model, tools=[search])
        >>> result = graph.compile().invoke({"messages": [("user", "Find it!")]})
        >>> sorted(message.content for message in result["messages"] if message.type == "tool")
        ["Tool call limit exceeded. Do not call 'search' again.", 'nothing found']
    """

    @one_list
    def __init__(  # noqa: PLR0913 - keyword-only settings with defaults
        self,
        limits: Sequence[Limit],
        *,
        tell_model: bool = False,
        hide_exhausted: bool = False,
        on_decision: Observer | Sequence[Observer] = (),
        store: QuotaStore | None = None,
        on_store_error: Outage = "deny",
        prices: Prices | Mapping[str, Price] | None = None,
        unknown_price: UnknownPrice = "error",
        telemetry: Telemetry | None = None,
    ) -> None:
        self._loop = Loop(
            limits,
            tell_model=tell_model,
            hide_exhausted=hide_exhausted,
            on_decision=on_decision,
            store=store,
            on_store_error=on_store_error,
            prices=prices,
            unknown_price=unknown_price,
            telemetry=telemetry,
        )
        watch_root_runs()

    def add_to(  # noqa: PLR0913 - what makes up a loop
        self,
        graph: StateGraph[Any, Any, Any, Any],
        *,
        model: str | BaseChatModel | Callable[..., Any] | Runnable[Any, Any],
        tools: Tools | ToolNode,
        prompt: str | SystemMessage | None = None,
        name: str | None = None,
        start: str | None = START,
        end: str = END,
    ) -> StateGraph[Any, Any, Any, Any]:
        """Add a loop of model and tools to a graph, with nodes that judge their calls.

        The nodes are `model` and `tools`, and `quota.before_agent`, `quota.before_model` and
        `quota.after_model`. The counts are in channels of their own, beside the graph's state:
        neither its input nor its output has them.

        Args:
            graph: The graph. Its state has `messages`.
            model: A chat model without tools, the name of one as `init_chat_model` takes it, or
                a model node of your own: a function or a Runnable, which calls the model with
                `call_model` or by itself.
            tools: The tools, or a `ToolNode` of your own.
            prompt: The system prompt, for a chat model.
            name: The agent's name in telemetry and on its messages. With a name, the names of the
                nodes begin with it: `researcher.model`. A second loop in a graph needs a name.
            start: The node from which the loop is entered. `None` adds no edge: then add an edge
                to `quota.before_agent` yourself.
            end: The node that the loop leaves to.

        Returns:
            The graph.

        Raises:
            TypeError: `graph` is no `StateGraph` or is compiled, the model has its tools bound
                already, or another argument has the wrong type.
            ValueError: The state has no `messages` with the reducer `add_messages`, a name is
                taken, or a limit has `at_once` and the `ToolNode` is not made by `tool_node`.
        """
        if isinstance(model, str):
            model = init_chat_model(model)
        nodes = Nodes(self._loop, graph, name=name, end=end)
        nodes.add(model, tools, prompt=prompt, start=start)
        return graph

    def tool_node(self, tools: Tools, **options: Any) -> ToolNode:
        """A `ToolNode` whose calls wait where a limit has `at_once` and too many run.

        `add_to` and `react_hooks` make one from a list of tools. Make it yourself for a loop of
        your own, and for the tools of `create_supervisor`.

        Args:
            tools: The tools.
            options: Further arguments of `ToolNode`, except its wrappers.
        """
        return self._loop.tool_node(tools, **options)

    def begin(self, state: State) -> dict[str, Any]:
        """Begin a new run of a loop of your own, before its first model call.

        This method and those below it take a state, a mapping with `messages`, and return the
        state after the step. In an `@entrypoint`, call each method in a `@task`: then a resumed
        run judges nothing twice.

        Args:
            state: The thread's state after the previous run, with the new messages.
        """
        kept = {key: each for key, each in state.items() if key not in (RUN_TOOLS, RUN_MODEL)}
        fresh = identified_state(kept)
        return merged(fresh, {"jump_to": "model", **self._loop.begin(fresh)})

    async def abegin(self, state: State) -> dict[str, Any]:
        """`begin`, without blocking the event loop."""
        return self.begin(state)

    def before_model(self, state: State) -> dict[str, Any]:
        """Judge the next model call; `jump_to` is then `"model"`, or `"end"` if it is refused.

        Args:
            state: The state.

        Raises:
            ModelCallLimitExceededError: A limit with `exit_behavior="error"` is reached.
            RuntimeError: A limit's function or an observer is async, or a refused call was made.
        """
        given = identified_state(state)
        return merged(given, now(self._loop.judge_model("", given)))

    async def abefore_model(self, state: State) -> dict[str, Any]:
        """`before_model`, without blocking the event loop."""
        given = identified_state(state)
        return merged(given, await self._loop.judge_model("a", given))

    def call_model(
        self,
        model: BaseChatModel,
        state: State,
        tools: Tools = (),
        *,
        prompt: str | SystemMessage | None = None,
    ) -> AIMessage:
        """Call a model: it reads what is left (`tell_model`), and is offered what it may call.

        It is for a model node of your own, and for the functional API. Without it `tell_model`,
        `hide_exhausted` and the last request of `"finalize"` do not reach the model. The limits
        hold without it, except a `reserve` that is a function.

        Args:
            model: The chat model, without tools.
            state: The state.
            tools: The tools that it is offered.
            prompt: The system prompt.

        Raises:
            ModelCallLimitExceededError: The function `reserve` of a limit with
                `exit_behavior="error"` says that the call could exceed it.
            UnknownPriceError: There is a limit of costs, and no price for the model.
        """
        message, _ = now(self._loop.ask("", model, state, tools, prompt))
        return message

    async def acall_model(
        self,
        model: BaseChatModel,
        state: State,
        tools: Tools = (),
        *,
        prompt: str | SystemMessage | None = None,
    ) -> AIMessage:
        """`call_model`, without blocking the event loop."""
        message, _ = await self._loop.ask("a", model, state, tools, prompt)
        return message

    def after_model(self, state: State) -> dict[str, Any]:
        """Judge the tool calls that the model made; `jump_to` then says where the loop goes.

        It is `"tools"` if calls were admitted: `open_calls` returns them. It is `"model"` if all
        were refused, and `"end"` if there are none, or if a limit ends the run.

        Args:
            state: The state.

        Raises:
            ToolCallLimitExceededError: A limit with `exit_behavior="error"` refuses a call.
            RuntimeError: A limit's function or an observer is async, or a refused call was made.
        """
        given = identified_state(state)
        return merged(given, now(self._loop.judge_tools("", given)))

    async def aafter_model(self, state: State) -> dict[str, Any]:
        """`after_model`, without blocking the event loop."""
        given = identified_state(state)
        return merged(given, await self._loop.judge_tools("a", given))

    @staticmethod
    def open_calls(state: State) -> list[ToolCall]:
        """The tool calls to run: those of the newest model call that have no answer yet."""
        return open_calls(state)

    def react_hooks(
        self,
        model: str | BaseChatModel | None = None,
        tools: Tools = (),
        *,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Arguments that put the limits on `create_react_agent` or `create_supervisor`.

        With a model, `create_react_agent(**quota.react_hooks(model, tools))` works everywhere.
        Without a model, the hooks are for
        `create_supervisor(agents, model=model, **quota.react_hooks())`: a model limit ends the
        supervisor's graph, and `tell_model` and `hide_exhausted` have no effect. Elsewhere a model
        limit needs the model: without it, the agent's first step raises a `RuntimeError`, unless
        the agent is a node of a graph that has its `state_schema`. The counts are keys of the
        agent's state, so pass on only the messages of a client's input.

        Args:
            model: The chat model, without tools, or its name.
            tools: The tools, with the model.
            name: The agent's name in telemetry.

        Returns:
            `pre_model_hook`, `post_model_hook` and `state_schema`; with a model, also `model` and
            `tools`. A schema of your own must be a subclass of this one.

        Raises:
            TypeError: The model has the wrong type.
            ValueError: There is no model, and a limit has a `reserve` that is a function.
        """
        if isinstance(model, str):
            model = init_chat_model(model)
        if model is not None:
            check_model(model)
        else:
            self._loop.check_bounds()
        # Without a model it is a part of a graph, as in create_supervisor.
        loop = self._loop.sharing_state() if model is None else self._loop
        hooks = ReactHooks(loop, has_model=model is not None)
        metadata = {} if name is None else {"lc_agent_name": name}
        before = RunnableLambda(hooks.before, hooks.abefore, name="pre_model_hook")
        after = RunnableLambda(hooks.after, hooks.aafter, name="post_model_hook")
        arguments: dict[str, Any] = {
            "pre_model_hook": before.with_config(metadata=metadata),
            "post_model_hook": after.with_config(metadata=metadata),
            "state_schema": ReactState,
        }
        if model is not None:
            given = self._loop.tool_node(tools) if self._loop.wraps_tools else list(tools)
            arguments |= {"model": ReactModel(self._loop, model, tools), "tools": given}
        return arguments

    def reset(self, graph: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> None:
        """Set a thread's counts to 0, in its state and in the store.

        Args:
            graph: The compiled graph that `add_to` added to.
            config: Names the thread: `{"configurable": {"thread_id": …}}`.

        Raises:
            TypeError: `graph` is not a graph of this process, but a remote one, for example.
            ValueError: `add_to` added nothing to it.
            RuntimeError: The thread has no state, or waits in mid-run.
            QuotaStoreError: The store could not be asked.
        """
        self._loop.reset(graph, config)

    async def areset(self, graph: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> None:
        """`reset`, without blocking the event loop."""
        await self._loop.areset(graph, config)

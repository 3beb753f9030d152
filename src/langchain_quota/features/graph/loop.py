"""The hooks of QuotaMiddleware as steps of a loop that the user's code drives."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from typing import Any, Literal
from uuid import uuid4
from weakref import WeakKeyDictionary

from langchain.agents.middleware.types import ModelRequest, ModelResponse
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolCall
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.tools import tool as as_tool
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode

from langchain_quota.features.budgets.charged_response import ChargedResponse
from langchain_quota.features.graph.charges import LoopBudgets, joined
from langchain_quota.features.root_run.run import root_run
from langchain_quota.middleware._calls import Update
from langchain_quota.middleware._context import CallContext, running_config, running_runtime
from langchain_quota.middleware._form import Form, ask
from langchain_quota.middleware._history import pending_calls, since
from langchain_quota.middleware.quota import QuotaMiddleware
from langchain_quota.state import LEDGER, Ledger, ledger, merge_ledgers

State = Mapping[str, Any]
Jump = Literal["model", "tools", "end"]
Tools = Sequence[BaseTool | Callable[..., Any] | dict[str, Any]]
Prompt = str | SystemMessage | None

CALLED: Update = {LEDGER: Ledger(admitted=None)}
"""What the model's node of a graph writes: the call that was admitted is made."""


class Loop(QuotaMiddleware[Any, Any]):
    """Judges in a loop of model and tools that `create_agent` did not make."""

    _shares_state = False
    _budgets_class = LoopBudgets
    _budgets: LoopBudgets | None

    def sharing_state(self) -> "Loop":
        """A copy for a graph that shares its state with the graph around it."""
        loop = copy(self)
        loop._shares_state = True  # noqa: SLF001 - it is one of these
        return loop

    @property
    def name(self) -> str:
        """The middleware's name in a graph."""
        return "quota"

    def begin(self, state: State) -> Update:
        """Begin a new run, whether or not one has begun."""
        update = self._begin_run(state, running_runtime())
        update[LEDGER] |= Ledger(begun_in=_invocation(), admitted=None)
        return update

    def begin_once(self, state: State) -> Update:
        """Begin a new run, unless this one has begun already: one run for each invocation."""
        known, root, invocation = ledger(state), root_run(), _invocation()
        if invocation is not None and invocation == known.get("begun_in"):
            return {}
        if root is None or not root.resumes or _asks_anew(state, known):
            return self.begin(state)
        return _resumed(state)

    async def abegin_once(self, state: State) -> Update:
        """Begin a new run, unless this one has begun already: it needs no thread for that."""
        return self.begin_once(state)

    @property
    def ends_before_model(self) -> bool:
        """Whether a limit can end a run before a model call, other than with an exception."""
        return any(limit.exit_behavior != "error" for limit in self._current.of_kind["model"])

    async def judge_model(self, form: Form, state: State) -> Update:
        """Judge the next model call; what is written says where to go."""
        update = await self._before_model(form, state, running_runtime()) or {}
        return self._to_model(state, update)

    async def judge_tools(self, form: Form, state: State) -> Update:
        """Judge the tool calls that the model made; what is written says where to go."""
        runtime = running_runtime()
        charged: Update = {}
        if self._budgets is not None:
            known = self._budgets.unwritten(state)
            if known is None and ledger(state).get("uncharged"):
                limits = await self._resolve(form, "model", state, runtime)
                known = await self._budgets.charge_answer(form, state, runtime, limits)
            charged = known or {}
        update = await self._after_model(form, merged(state, charged), runtime) or {}
        return joined(charged, _with_jump(state, update))

    async def ask(
        self, form: Form, model: BaseChatModel, state: State, tools: Tools, prompt: Prompt
    ) -> tuple[AIMessage, Update]:
        """Call the model with what is left and what it may call; its answer, what is written."""

        async def call(request: ModelRequest[Any]) -> ModelResponse[Any]:
            bound, given = _bound(request)
            return ModelResponse(result=[await ask(form, bound, "invoke", given)])

        request = _request(model, state, tools, prompt)
        return self._answer(state, await self._wrap_model_call(form, request, call))

    def tool_node(self, tools: Tools, **options: Any) -> ToolNode:
        """A node of tools, whose calls wait where too many run, and know their root run."""
        wrappers: dict[str, Any] = {}
        # Up to LangGraph 1.1, a wrapped node that handles errors takes interrupts for errors.
        if self._at_once is not None or (
            self._counts_root_runs and not options.get("handle_tool_errors")
        ):
            wrappers = {
                "wrap_tool_call": self.wrap_tool_call,
                "awrap_tool_call": self.awrap_tool_call,
            }
        return ToolNode(
            [each for each in tools if not isinstance(each, dict)], **wrappers, **options
        )

    def check_holds(self, node: ToolNode) -> None:
        """Check that the calls of a node of tools wait where too many run."""
        own = getattr(node, "_awrap_tool_call", None)
        if self._at_once is not None and own != self.awrap_tool_call:
            raise ValueError(
                "a limit has at_once, and a ToolNode of your own does not wait: give the tools "
                "as a list, or make the node with quota.tool_node(tools)"
            )

    async def run_node(
        self, form: Form, state: State, run: Callable[[], Awaitable[Any]]
    ) -> tuple[Any, Update]:
        """Run a model's node of the user's own, where there are budgets; and what is written."""
        assert self._budgets is not None  # noqa: S101 - for the type checker
        runtime = running_runtime()
        limits = await self._resolve(form, "model", state, runtime)
        return await self._budgets.run_node(form, state, runtime, limits, run)

    @property
    def wraps_tools(self) -> bool:
        """Whether something is done around tool calls."""
        return self._at_once is not None or self._counts_root_runs

    @property
    def on_trial(self) -> bool:
        """Whether no limit refuses anything."""
        return not any(limit.enforce for limit in self.limits)

    @property
    def has_budgets(self) -> bool:
        """Whether what model calls use is charged."""
        return self._budgets is not None

    def check_bounds(self) -> None:
        """Check that no limit needs a request, for hooks that see none."""
        for limit in self._current.of_kind["model"]:
            if callable(getattr(limit, "reserve", None)):
                raise ValueError(  # noqa: TRY004 - a number would do
                    f"limit {limit.name!r} has a reserve that is a function of the request, and "
                    "hooks without a model do not see one: give reserve as a number, or the model "
                    "to the hooks: react_hooks(model, tools)"
                )

    def _to_model(self, state: State, update: Update) -> Update:
        """The update with where to go: to the model, unless a limit ends the run."""
        update = joined(_resumed(state), {"jump_to": "model", **update})
        if self._budgets is None or update["jump_to"] == "end":
            return update
        return joined(update, {LEDGER: Ledger(uncharged=True)})

    def _answer(self, state: State, response: ModelResponse[Any]) -> tuple[AIMessage, Update]:
        """What the model answers, and what is written of the call."""
        (message,) = response.result
        assert isinstance(message, AIMessage)  # noqa: S101 - for the type checker
        if self._budgets is None or not isinstance(response, ChargedResponse):
            return message, {}
        update: Any = response.command and response.command.update
        if not update:
            # The node around it is charged.
            return message, {}
        if "ended" in update[LEDGER]:
            self._budgets.nothing_used(state)
        self._budgets.write_with_node(update)
        return message, joined(update, {LEDGER: Ledger(uncharged=False)})

    def _counts_last(self, context: CallContext) -> bool:
        """Whether the counts of threads outlive the run: an entrypoint can save its state."""
        if super()._counts_last(context):
            return True
        return bool(context.invocation) and (self._shares_state or _in_a_task())


def identified_state(state: State) -> dict[str, Any]:
    """The state with messages as LangGraph's reducer makes them: of their class, and with an id."""
    given: Any = state["messages"]
    return {**state, "messages": add_messages([], given)}


def merged(state: State, update: Update) -> dict[str, Any]:
    """The state after an update, without the effect of reducers that are not ours."""
    after = {**state, **update}
    if "messages" in update:
        given: Any = state.get("messages") or []
        after["messages"] = add_messages(given, update["messages"])
    if LEDGER in update:
        after[LEDGER] = merge_ledgers(ledger(state), update[LEDGER])
    return after


def open_calls(state: State) -> list[ToolCall]:
    """The tool calls that wait for an answer."""
    waiting = pending_calls(state)
    return [] if waiting is None else list(waiting.calls)


def _with_jump(state: State, update: Update) -> Update:
    """The update with where to go: to the tools that were admitted, back to the model, or out."""
    if update.get("jump_to") == "end":
        return update
    after = {**state, "messages": [*state.get("messages", ()), *update.get("messages", ())]}
    waiting = pending_calls(after)
    jump: Jump = "end" if waiting is None else "tools" if waiting.calls else "model"
    return {**update, "jump_to": jump}


def _invocation() -> str | None:
    """Names the invocation of the graph; of one inside another graph, the root run."""
    root = root_run()
    if root is None:
        return None
    running = running_runtime()
    info = getattr(running, "execution_info", None)
    if info is None or "|" in info.checkpoint_ns:
        return root.key
    # Each invocation has a writer of its own.
    return _invocations.setdefault(running.stream_writer, uuid4().hex)


_invocations: WeakKeyDictionary[object, str] = WeakKeyDictionary()
"""The names of the invocations that run, by their stream writers."""


def _resumed(state: State) -> Update:
    """Note in which invocation this run goes on: a loop that is entered again is then known."""
    invocation = _invocation()
    if invocation is None or ledger(state).get("begun_in") in (None, invocation):
        return {}
    return {LEDGER: Ledger(begun_in=invocation)}


def _asks_anew(state: State, known: Ledger) -> bool:
    """Whether a run must begin anew: the user has written a message since the last one began."""
    messages = state.get("messages") or ()
    behind = since(messages, known.get("turn"))
    newest = messages[-1:] if behind is None else behind
    return not known or any(isinstance(each, HumanMessage) for each in newest)


def _in_a_task() -> bool:
    """Whether this is a task of the functional API, whose function keeps the state."""
    path: Any = (running_config().get("metadata") or {}).get("langgraph_path") or ()
    return len(path) > 1 and path[0] == "__pregel_push" and isinstance(path[1], tuple)


def _request(model: BaseChatModel, state: State, tools: Tools, prompt: Prompt) -> ModelRequest[Any]:
    offered = [each if isinstance(each, BaseTool | dict) else as_tool(each) for each in tools]
    system = SystemMessage(prompt) if isinstance(prompt, str) else prompt
    given: Any = {
        "model": model,
        "messages": list(state["messages"]),
        "system_message": system,
        "tools": offered,
        "state": state,
        "runtime": running_runtime(),
    }
    return ModelRequest(**given)


def _bound(request: ModelRequest[Any]) -> tuple[Runnable[Any, Any], list[Any]]:
    """The model with the tools that it is offered, and the messages."""
    bound: Runnable[Any, Any] = request.model
    if request.tools:
        bound = request.model.bind_tools(request.tools, **request.model_settings)
    elif request.model_settings:
        bound = request.model.bind(**request.model_settings)
    system = [] if request.system_message is None else [request.system_message]
    return bound, [*system, *request.messages]

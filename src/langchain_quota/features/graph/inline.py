"""InlineQuotaMiddleware: many limits without a node of the graph."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from typing import Any
from uuid import uuid4

from langchain.agents.middleware.types import (
    AgentMiddleware,
    ExtendedModelResponse,
    ModelRequest,
    ModelResponse,
    ResponseT,
)
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, RemoveMessage, ToolMessage
from langgraph.types import Command

from langchain_quota.arguments import one_list
from langchain_quota.concurrency import Form, in_sync, now
from langchain_quota.errors import ModelCallLimitExceededError, ToolCallLimitExceededError
from langchain_quota.limits import Limit, check_together
from langchain_quota.limits.budgets import Price, Prices, UnknownPrice
from langchain_quota.middleware.calls import Update, with_state
from langchain_quota.middleware.feature import Handler
from langchain_quota.middleware.flow import ContextT
from langchain_quota.middleware.history import identified, since
from langchain_quota.middleware.quota import QuotaMiddleware
from langchain_quota.rule import Outage
from langchain_quota.state import (
    LEDGER,
    ledger,
    merge_ledgers,
    run_model,
    run_tools,
    thread_model,
    thread_tools,
)
from langchain_quota.stores import QuotaStore
from langchain_quota.telemetry import Telemetry
from langchain_quota.telemetry.observers import Observer

OLDEST_LANGCHAIN = (1, 4)
"""In older versions, a graph without `after_model` hooks cannot go from the model to the model."""


class InlineQuotaMiddleware(QuotaMiddleware[ContextT, ResponseT]):
    """`QuotaMiddleware` that adds no graph node to a step; experimental.

    It judges around the model call, inside the model's own step. Whatever the number of limits, it
    adds no superstep, no checkpoint and no step of the recursion limit, except one at the beginning
    of a run. Arguments, counting and telemetry are those of `QuotaMiddleware`; the documentation
    lists the differences. List it first: it does not see what a middleware listed before it
    answers, drops or tries again. It needs LangChain 1.4.

    Args:
        limits: The limits, at least one, each under a name of its own.
        tell_model: As in `QuotaMiddleware`.
        hide_exhausted: As in `QuotaMiddleware`.
        on_decision: As in `QuotaMiddleware`.
        store: As in `QuotaMiddleware`.
        on_store_error: As in `QuotaMiddleware`.
        prices: As in `QuotaMiddleware`.
        unknown_price: As in `QuotaMiddleware`.
        charge_all_models: As in `QuotaMiddleware`.
        telemetry: As in `QuotaMiddleware`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, or arguments do not go together; see
            `QuotaMiddleware`.

    Examples:
        >>> from langchain.agents import create_agent
        >>> from langchain_quota import InlineQuotaMiddleware, ModelCallLimit, ToolCallLimit
        >>> from langchain_quota.testing import ScriptedChatModel
        >>> limits = [ModelCallLimit(run_limit=10), ToolCallLimit(run_limit=50)]
        >>> quota = InlineQuotaMiddleware(limits)
        >>> agent = create_agent(ScriptedChatModel(script=["Hello."]), middleware=[quota])
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
        charge_all_models: bool = False,
        telemetry: Telemetry | None = None,
    ) -> None:
        check_together(limits)
        for limit in limits:
            if limit.exit_behavior == "ask":
                raise ValueError(
                    f"limit {limit.name!r} has exit_behavior='ask', which needs "
                    "QuotaMiddleware: a run that InlineQuotaMiddleware interrupts would call the "
                    "model again"
                )
        super().__init__(
            limits,
            tell_model=tell_model,
            hide_exhausted=hide_exhausted,
            on_decision=on_decision,
            store=store,
            on_store_error=on_store_error,
            prices=prices,
            unknown_price=unknown_price,
            charge_all_models=charge_all_models,
            telemetry=telemetry,
        )

    _in_agent = True
    """Whether `create_agent` makes the graph."""

    # LangChain makes no node for a hook that is its own base class's.
    before_model = AgentMiddleware.before_model
    abefore_model = AgentMiddleware.abefore_model
    after_model = AgentMiddleware.after_model
    aafter_model = AgentMiddleware.aafter_model

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the hooks of a class that a subclass lists after this one."""
        for hook in ("before_model", "abefore_model", "after_model", "aafter_model"):
            first, *others = (each for each in cls.__mro__ if hook in vars(each))
            behind = next(each for each in others if not issubclass(each, QuotaMiddleware))
            if first is InlineQuotaMiddleware and behind is not AgentMiddleware:
                setattr(cls, hook, vars(behind)[hook])
        super().__init_subclass__(**kwargs)

    def wrap_model_call(  # type: ignore[override]  # it writes to the state, too
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], ModelResponse[ResponseT]],
    ) -> ExtendedModelResponse[ResponseT]:
        """Judge the model call, make it, and judge the tool calls that it makes.

        Raises:
            ModelCallLimitExceededError: A limit with `exit_behavior="error"` is reached, or a run
                that a limit has ended is led back to the model.
            ToolCallLimitExceededError: A limit with `exit_behavior="error"` refuses a call, or a
                run that a limit has ended is led back to its tools.
            RuntimeError: A limit's function or an observer is async, or another middleware of this
                agent judges around the model call, too.
            TypeError: What a limit or a quota computes or reads from the context has the wrong
                type, or the store does not serve sync calls.
            ValueError: It is out of bounds or missing.
        """
        return now(self._wrap_model_call("", request, in_sync(handler)))

    async def awrap_model_call(  # type: ignore[override]  # the same
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], Awaitable[ModelResponse[ResponseT]]],
    ) -> ExtendedModelResponse[ResponseT]:
        """`wrap_model_call`, without blocking the event loop."""
        return await self._wrap_model_call("a", request, handler)

    async def _wrap_model_call(  # type: ignore[override]  # the same
        self, form: Form, request: ModelRequest[Any], handler: Handler
    ) -> ExtendedModelResponse[ResponseT]:
        step = _Step(self.name, request)
        task = f"{self.name}.model"
        step.write(await self._judge_model(form, step.state, request.runtime, task=task))
        if not step.ended:
            self._learn_tools(request)
            written: Update = {}
            response = await self._call_model(form, step.request, handler, written)
            step.write(written)
            if response is not None:
                step.answer(response)
            for after_model in self._hooks["after_model"]:
                # The graph may drop what this step writes.
                after_model(step.state, saved=False)
            if response is not None:
                task = f"{self.name}.tools.{step.digest()}"
                update = await self._judge_tools(form, step.state, request.runtime, task=task)
                step.write(update)
        return step.response()

    def _begin_run(self, form: Form, state: Mapping[str, Any], runtime: Any) -> Update:
        if self._in_agent and _langchain() < OLDEST_LANGCHAIN:
            raise RuntimeError(f"{self.name} needs langchain 1.4 or newer: use QuotaMiddleware")
        return super()._begin_run(form, state, runtime)

    def _judging_nodes(self) -> tuple[str, ...]:
        """The nodes of the graph in which this middleware judges."""
        return ("model",)


@cache
def _langchain() -> tuple[int, ...]:
    """The version of LangChain, as far as it matters."""
    return tuple(map(int, version("langchain").split(".")[:2]))


class _StepState(dict[str, Any]):
    """The state that a step passes on to the middlewares inside."""


class _Step:
    """One step of the model, and what is judged and written in it."""

    def __init__(self, middleware: str, request: ModelRequest[Any]) -> None:
        if isinstance(request.state, _StepState):
            # Both would write the counts, and neither sees what the other one writes.
            raise RuntimeError(  # noqa: TRY004 - the agent is put together wrongly
                f"{middleware} and another middleware of this agent both judge around the model "
                "call: put all limits into one InlineQuotaMiddleware"
            )
        self._middleware = middleware
        self._given = request
        self._overruled = _overruled(request.state.get("messages") or ())
        self._written: Update = {}
        self._messages: list[Any] = []
        self._structured: Any = None
        self._state: _StepState | None = None

    @property
    def state(self) -> _StepState:
        """The state with what was written."""
        if self._state is None:
            state: Mapping[str, Any] = self._given.state
            self._state = _StepState(
                {
                    **state,
                    **self._written,
                    LEDGER: merge_ledgers(ledger(state), self._written.get(LEDGER, {})),
                    "messages": [*self._kept(state.get("messages") or []), *self._messages],
                    "structured_response": self._structured,
                }
            )
        return self._state

    @property
    def request(self) -> ModelRequest[Any]:
        """The request, with that state."""
        given = with_state(self._given, self.state)
        return given.override(messages=self._kept(given.messages)) if self._overruled else given

    @property
    def ended(self) -> bool:
        """Whether a limit has ended the run."""
        return "jump_to" in self._written

    def write(self, update: Update | None) -> None:
        """Take in what is to be written to the state."""
        if not update:
            return
        self._state = None
        update = dict(update)
        self._refuse_circling(update)
        self._messages += update.pop("messages", ())
        known = self._written.get(LEDGER, {})
        if LEDGER in update:
            update[LEDGER] = merge_ledgers(known, update[LEDGER])
        self._written |= update

    def answer(self, response: ModelResponse[Any]) -> None:
        """Add the model's answer to the state."""
        self._state = None
        answered = {each.tool_call_id for each in response.result if isinstance(each, ToolMessage)}
        self._messages += [_chargeable(message, answered) for message in response.result]
        self._structured = response.structured_response

    def digest(self) -> str:
        """Names the tool calls of the model: when the step runs again, it may make others."""
        made = [
            f"{call['id']}/{call['name']}"
            for message in self._messages
            if isinstance(message, AIMessage)
            for call in message.tool_calls
        ]
        return sha256("\n".join(made).encode(errors="backslashreplace")).hexdigest()

    def response(self) -> ExtendedModelResponse[Any]:
        """The response for the model node."""
        result = self._messages
        if self._overruled:
            result = [*result, *(RemoveMessage(id=each) for each in sorted(self._overruled))]
        made = ModelResponse(result=result, structured_response=self._structured)
        return ExtendedModelResponse(model_response=made, command=Command(update=self._written))

    def _refuse_circling(self, update: Update) -> None:
        """Raise if a run that a limit has ended is led back: it could go on forever."""
        # Another middleware's `after_model` hook may do so, or LangChain itself, which waits for a
        # structured response where there are no tools.
        if "jump_to" not in update:
            return
        if self._messages and ledger(self.state).get("final"):
            # The last call of its budget is not made again and again, whatever it answers.
            return
        state: Mapping[str, Any] = self._given.state
        text = update["messages"][-1].content
        messages = state.get("messages") or ()
        turn = ledger(state).get("turn")
        # Without the run's first message, the run's messages cannot be found.
        known = messages if turn is None else since(messages, turn) or ()
        if any(isinstance(each, AIMessage) and each.content == text for each in known):
            if not self._messages:
                thread, run = thread_model(state), run_model(state)
                raise ModelCallLimitExceededError(thread, run, None, None, message=text)
            thread = max(thread_tools(state).values(), default=0)
            run = max(run_tools(state).values(), default=0)
            raise ToolCallLimitExceededError(thread, run, None, None, message=text)

    def _kept(self, messages: list[AnyMessage]) -> list[AnyMessage]:
        if not self._overruled:
            return messages
        return [message for message in messages if message.id not in self._overruled]


def _chargeable(message: BaseMessage, answered: set[str]) -> BaseMessage:
    """The message with the ids under which charges are kept: its own, and one for each call."""
    if not isinstance(message, AIMessage):
        return message
    if message.id is None:
        # A copy: a cache may give the same message again.
        message = message.model_copy(update={"id": str(uuid4())})
    return identified(message, answered)


def _overruled(messages: Sequence[AnyMessage]) -> set[str]:
    """The ids of our refusals whose calls a reviewer has answered, too."""
    refusals: dict[str, str] = {}
    answered: set[str] = set()
    for message in reversed(messages):
        if isinstance(message, AIMessage):
            ids = [call["id"] for call in message.tool_calls]
            # Two calls under one id have two answers.
            return {each for each, call_id in refusals.items() if ids.count(call_id) == 1}
        if isinstance(message, ToolMessage):
            if message.tool_call_id in answered and message.status == "error" and message.id:
                refusals[message.id] = message.tool_call_id
            answered.add(message.tool_call_id)
    return set()

"""InlineQuotaMiddleware: many limits without a node of the graph."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from itertools import takewhile
from typing import Any
from uuid import uuid4

from langchain.agents.middleware.types import (
    ExtendedModelResponse,
    ModelRequest,
    ModelResponse,
    ResponseT,
)
from langchain_core.messages import AIMessage, AnyMessage, RemoveMessage, ToolMessage
from langgraph.types import Command, PregelTask
from langgraph.typing import ContextT

from langchain_quota.errors import ModelCallLimitExceededError, ToolCallLimitExceededError
from langchain_quota.limits import Terms
from langchain_quota.middleware.model_case import ModelCase
from langchain_quota.middleware.quotas import Quotas
from langchain_quota.middleware.rulings import Update
from langchain_quota.middleware.tool_case import ToolCase, tool_case
from langchain_quota.state import (
    LEDGER,
    ledger,
    merge_ledgers,
    run_model,
    run_tools,
    thread_model,
    thread_tools,
)

OLDEST_LANGCHAIN = (1, 4)
"""Before it, a graph without `after_model` hooks has no way from the model back to the model."""


class InlineQuotaMiddleware(Quotas[ContextT, ResponseT]):
    """`QuotaMiddleware` without a node of the graph in a step; experimental.

    It judges around the model call, inside the model's own step. Whatever the number of limits, it
    adds no superstep, no checkpoint and no step of the recursion limit, but for the one at the
    beginning of a run. Arguments, counting and telemetry are those of `QuotaMiddleware`; where its
    meaning is another, the documentation says so. List it first: what a middleware listed before
    it answers, drops or tries again is beyond it. Needs LangChain 1.4.

    Args:
        limits: The limits, at least one, each under a name of its own.
        tell_model, hide_exhausted, on_decision, store, on_store_error, telemetry: As of
            `QuotaMiddleware`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no limit, two have one name, one can never be reached, or one has
            quotas and there is no store.

    Example:
        ```python
        from langchain.agents import create_agent
        from langchain_quota import InlineQuotaMiddleware, ModelCallLimit, ToolCallLimit

        quota = InlineQuotaMiddleware([ModelCallLimit(run_limit=10), ToolCallLimit(run_limit=50)])
        agent = create_agent("openai:gpt-5.5", tools=[search], middleware=[quota])
        ```
    """

    def wrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], ModelResponse[ResponseT]],
    ) -> ExtendedModelResponse[ResponseT]:
        """Judge the model call, make it, and judge the tool calls that it makes.

        Raises:
            ModelCallLimitExceededError: A limit with `exit_behavior="error"` is reached.
            ToolCallLimitExceededError: A limit with `exit_behavior="error"` refuses a call.
            RuntimeError: A limit's function or an observer is async.
        """
        step = _Step(self.name, request)
        terms = self._terms_now(self._model_limits, step.state, request.runtime)
        step.write(self._conclude(self._judge(step.model_case(terms))))
        if not step.ended:
            step.answer(handler(self._shape(step.request)))
            terms = self._terms_now(self._tool_limits, step.state, request.runtime)
            case = step.tool_case(terms)
            if case is not None:
                step.write(self._conclude(self._judge(case)))
        return step.response()

    async def awrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], Awaitable[ModelResponse[ResponseT]]],
    ) -> ExtendedModelResponse[ResponseT]:
        """Judge the model call, make it, and judge the tool calls that it makes.

        Raises:
            ModelCallLimitExceededError: A limit with `exit_behavior="error"` is reached.
            ToolCallLimitExceededError: A limit with `exit_behavior="error"` refuses a call.
        """
        step = _Step(self.name, request)
        terms = await self._aterms_now(self._model_limits, step.state, request.runtime)
        step.write(await self._aconclude(await self._ajudge(step.model_case(terms))))
        if not step.ended:
            step.answer(await handler(await self._ashape(step.request)))
            terms = await self._aterms_now(self._tool_limits, step.state, request.runtime)
            case = step.tool_case(terms)
            if case is not None:
                step.write(await self._aconclude(await self._ajudge(case)))
        return step.response()

    def _begin_run(self, state: Mapping[str, Any], runtime: Any) -> Update:
        if tuple(map(int, version("langchain").split(".")[:2])) < OLDEST_LANGCHAIN:
            raise RuntimeError(f"{self.name} needs langchain 1.4 or newer: use QuotaMiddleware")
        return super()._begin_run(state, runtime)

    def _stopped_at_a_limit(self, task: PregelTask) -> bool:
        """Whether a task failed because a limit ended the run with an exception."""
        return task.name == "model" and "CallLimitExceededError" in repr(task.error)


class _StepState(dict[str, Any]):
    """The state as a step hands it on to the middlewares inside."""


class _Step:
    """One step of the model, and what is judged and written in it.

    Args:
        middleware: The name of the middleware.
        request: The model request.

    Raises:
        RuntimeError: The step is inside another one.
    """

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

    @property
    def state(self) -> _StepState:
        """The state as it is after what was written."""
        state: Mapping[str, Any] = self._given.state
        written = {key: value for key, value in self._written.items() if key != LEDGER}
        return _StepState(
            {
                **state,
                **written,
                LEDGER: merge_ledgers(ledger(state), self._written.get(LEDGER, {})),
                "messages": [*self._kept(state.get("messages") or ()), *self._messages],
                "structured_response": self._structured,
            }
        )

    @property
    def request(self) -> ModelRequest[Any]:
        """The request, with that state."""
        state: Any = self.state
        return self._given.override(state=state, messages=self._kept(self._given.messages))

    @property
    def ended(self) -> bool:
        """Whether a limit has ended the run."""
        return "jump_to" in self._written

    def write(self, update: Update | None) -> None:
        """Take in what is to be written to the state.

        Raises:
            ModelCallLimitExceededError, ToolCallLimitExceededError: It ends a run that it has
                ended before, and that was led back.
        """
        update = dict(update or {})
        self._refuse_circling(update)
        self._messages += update.pop("messages", ())
        known = self._written.get(LEDGER, {})
        if LEDGER in update:
            update[LEDGER] = merge_ledgers(known, update[LEDGER])
        self._written |= update

    def answer(self, response: ModelResponse[Any]) -> None:
        """Take in what the model answered."""
        # Charges are kept by the message's id. A copy: a cache may give the same message again.
        self._messages += [
            message.model_copy(update={"id": str(uuid4())})
            if isinstance(message, AIMessage) and message.id is None
            else message
            for message in response.result
        ]
        self._structured = response.structured_response

    def model_case(self, terms: Sequence[Terms]) -> ModelCase:
        """The model call that is about to be made."""
        judge = f"{self._middleware}.model"
        return ModelCase(self.state, self._given.runtime, terms, judge=judge)

    def tool_case(self, terms: Sequence[Terms]) -> ToolCase | None:
        """The tool calls that the model has made."""
        calls = [
            f"{call['id']}/{call['name']}"
            for message in self._messages
            if isinstance(message, AIMessage)
            for call in message.tool_calls
        ]
        # When the step runs again, the model may call other tools.
        digest = sha256("\n".join(calls).encode(errors="backslashreplace")).hexdigest()
        judge = f"{self._middleware}.tools.{digest}"
        return tool_case(self.state, self._given.runtime, terms, judge=judge, every_call=True)

    def response(self) -> ExtendedModelResponse[Any]:
        """What the model node makes of it."""
        removed = [RemoveMessage(id=each) for each in sorted(self._overruled)]
        made = ModelResponse(
            result=[*self._messages, *removed], structured_response=self._structured
        )
        return ExtendedModelResponse(model_response=made, command=Command(update=self._written))

    def _refuse_circling(self, update: Update) -> None:
        """Raise where a run that a limit has ended is led back, and would be for ever.

        Another middleware's `after_model` hook may do so, or LangChain itself, which waits for a
        structured response where there are no tools.
        """
        if "jump_to" not in update:
            return
        state: Mapping[str, Any] = self._given.state
        text = update["messages"][-1].content
        turn = ledger(state).get("turn")
        messages = state.get("messages") or ()
        since = list(takewhile(lambda each: each.id != turn, reversed(messages)))
        # Without the message that the run began with, nobody knows which are the run's.
        is_whole = turn is None or len(since) < len(messages)
        if is_whole and any(isinstance(each, AIMessage) and each.content == text for each in since):
            if not self._messages:
                thread, run = thread_model(state), run_model(state)
                raise ModelCallLimitExceededError(thread, run, None, None, message=text)
            thread = max(thread_tools(state).values(), default=0)
            run = max(run_tools(state).values(), default=0)
            raise ToolCallLimitExceededError(thread, run, None, None, message=text)

    def _kept(self, messages: Sequence[AnyMessage]) -> list[AnyMessage]:
        return [message for message in messages if message.id not in self._overruled]


def _overruled(messages: Sequence[AnyMessage]) -> set[str]:
    """The refusals among the newest answers that a reviewer has answered, too."""
    overruled: set[str] = set()
    answered: set[str] = set()
    for message in reversed(messages):
        if isinstance(message, AIMessage):
            break
        if isinstance(message, ToolMessage):
            if message.tool_call_id in answered and message.status == "error" and message.id:
                overruled.add(message.id)
            answered.add(message.tool_call_id)
    return overruled

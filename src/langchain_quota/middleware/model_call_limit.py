"""ModelCallLimitMiddleware: a drop-in for LangChain's, with exact counts and telemetry."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, Literal

from langchain.agents.middleware.types import (
    ExtendedModelResponse,
    ModelRequest,
    ModelResponse,
    ResponseT,
    hook_config,
)
from langgraph.runtime import Runtime
from langgraph.types import Command

from langchain_quota.decision import Call, Decision
from langchain_quota.engine import Limits, Used, charge
from langchain_quota.limits import ModelCallLimit, Terms, check_choice
from langchain_quota.middleware.history import newest_name
from langchain_quota.middleware.limiter import Limiter
from langchain_quota.middleware.model_case import ModelCase
from langchain_quota.middleware.origin import origin
from langchain_quota.middleware.rulings import Update
from langchain_quota.middleware.typevars import ContextT
from langchain_quota.state import (
    LEDGER,
    RUN_MODEL,
    THREAD_MODEL,
    Ledger,
    ModelCallLimitState,
    ledger,
    run_model,
    thread_model,
)
from langchain_quota.telemetry import Telemetry


class ModelCallLimitMiddleware(Limiter[Any, ContextT, ResponseT], Generic[ResponseT, ContextT]):
    """Limits how many model calls an agent's thread and run may make, and makes each visible.

    A drop-in for LangChain's middleware of the same name: the same arguments, state keys,
    messages and exceptions; `limit_name`, `message` and `telemetry` are ours. A call is judged
    before the model is called, and counted when the model has returned: a call that raises is not
    counted, a call retried within one step counts once.

    Args:
        thread_limit: Most calls over the life of a thread, a whole number from 0; `None` for no
            limit. It needs a checkpointer, which keeps the count.
        run_limit: Most calls in one run (one invocation), likewise.
        exit_behavior: What a call over the limit does: `"end"` ends the run with a message,
            `"error"` raises `ModelCallLimitExceededError`.
        limit_name: The limit's name in metrics and spans, 1 to 64 printable characters; by
            default `model`. Give names to put two model limits on one agent.
        message: The final message instead of the default text: a text, or a function from the
            `Decision` to a text.
        telemetry: Where decisions are made visible; by default shared by the process, on
            Prometheus' global registry and OpenTelemetry's global tracer provider.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: No limit is given, or an argument is out of bounds. The message names the
            argument and the value.

    Examples:
        >>> from langchain.agents import create_agent
        >>> from langchain_quota import ModelCallLimitMiddleware
        >>> from langchain_quota.testing import ScriptedChatModel
        >>> def search(query: str = "") -> str:
        ...     "Search the web."
        ...     return "nothing found"
        >>> model = ScriptedChatModel(script=lambda messages: ["search"])
        >>> limiter = ModelCallLimitMiddleware(run_limit=3)
        >>> agent = create_agent(model, [search], middleware=[limiter])
        >>> agent.invoke({"messages": [("user", "Find it!")]})["messages"][-1].content
        'Model call limits exceeded: run limit (3/3)'
    """

    state_schema: type[ModelCallLimitState[Any]] = ModelCallLimitState

    def __init__(  # noqa: PLR0913 - LangChain's keyword arguments, and ours
        self,
        *,
        thread_limit: int | None = None,
        run_limit: int | None = None,
        exit_behavior: Literal["end", "error"] = "end",
        limit_name: str | None = None,
        message: str | Callable[[Decision], str] | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        check_choice("exit_behavior", exit_behavior, ("end", "error"))
        limit = ModelCallLimit(
            thread_limit=thread_limit,
            run_limit=run_limit,
            exit_behavior=exit_behavior,
            message=message,
            name="" if limit_name is None else limit_name,
        )
        super().__init__((limit,), limit_name=limit_name, telemetry=telemetry)
        self._terms = Terms.of(limit)
        self._matching = Limits([self._terms])
        self._model_mode = "returned"
        self.thread_limit = thread_limit
        self.run_limit = run_limit
        self.exit_behavior = exit_behavior

    @hook_config(can_jump_to=["end"])
    def before_model(
        self, state: ModelCallLimitState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Judge the model call that is about to be made.

        Raises:
            ModelCallLimitExceededError: The limit is reached and `exit_behavior` is `"error"`.
        """
        return self._judge_next(state, runtime)

    @hook_config(can_jump_to=["end"])
    async def abefore_model(
        self, state: ModelCallLimitState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Judge the model call that is about to be made; nothing in it waits or blocks.

        Raises:
            ModelCallLimitExceededError: The limit is reached and `exit_behavior` is `"error"`.
        """
        return self._judge_next(state, runtime)

    def wrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], ModelResponse[ResponseT]],
    ) -> ExtendedModelResponse[ResponseT]:
        """Count the call in the model's own step, so that no jump can skip it."""
        self._learn_tools(request)
        return self._counted(request, handler(request))

    async def awrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], Awaitable[ModelResponse[ResponseT]]],
    ) -> ExtendedModelResponse[ResponseT]:
        """Count the call in the model's own step, so that no jump can skip it."""
        self._learn_tools(request)
        return self._counted(request, await handler(request))

    def after_model(
        self,
        state: ModelCallLimitState[ResponseT],
        runtime: Runtime[ContextT],
    ) -> Update | None:
        """Count the call, unless it was counted in the model's step."""
        return self._count_uncounted(state, runtime)

    async def aafter_model(
        self,
        state: ModelCallLimitState[ResponseT],
        runtime: Runtime[ContextT],
    ) -> Update | None:
        """Count the call, unless it was counted in the model's step."""
        return self._count_uncounted(state, runtime)

    def _judge_next(self, state: Mapping[str, Any], runtime: Any) -> Update | None:
        case = ModelCase(state, runtime, self._matching, judge=self.name)
        update = self._conclude(case.rule(charging=False)) or {}
        if "jump_to" not in update and ledger(state).get("model_counted"):
            update[LEDGER] = {**update.get(LEDGER, {}), "model_counted": False}
        return update or None

    def _counted(
        self, request: ModelRequest[ContextT], response: ModelResponse[ResponseT]
    ) -> ExtendedModelResponse[ResponseT]:
        name = newest_name(response.result)
        update = self._count(request.state, request.runtime, name)
        return ExtendedModelResponse(model_response=response, command=Command(update=update))

    def _count_uncounted(
        self, state: ModelCallLimitState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update:
        if ledger(state).get("model_counted"):
            return {RUN_MODEL: run_model(state)}
        attempted = int(state.get("run_model_call_count") or 0) + 1
        name = newest_name(state.get("messages") or ())
        return {**self._count(state, runtime, name), RUN_MODEL: attempted}

    def _count(self, state: Mapping[str, Any], runtime: Any, name: str | None) -> Update:
        used = Used(thread_model(state), run_model(state))
        caller = origin(runtime, model_name=name)
        call = Call("model", agent=caller.agent, thread_id=caller.thread_id)
        # Two limiters count one call in one task.
        task_id = caller.task_id and f"{caller.task_id}/{self.name}"
        self._recorder.record_charge(call, charge(self._terms, used, call.amount), task_id=task_id)
        after = used.plus(call.amount)
        return {THREAD_MODEL: after.thread, LEDGER: Ledger(run_model=after.run, model_counted=True)}

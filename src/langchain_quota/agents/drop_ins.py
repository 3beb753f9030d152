"""Drop-ins for LangChain's two limiters, with exact counts and telemetry."""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Literal

from langchain.agents.middleware.types import ResponseT, hook_config
from langgraph.runtime import Runtime

from langchain_quota.core.decide import Verdict
from langchain_quota.core.decision import Decision
from langchain_quota.features.run_telemetry import Unchecked
from langchain_quota.features.setup_checks import CountWarnings, DeepAgents
from langchain_quota.limits.call import Call
from langchain_quota.limits.calls import ExitBehavior, ModelCallLimit, ToolCallLimit
from langchain_quota.middleware.base import ContextT, LimitMiddleware, WrittenResponse, may_end_runs
from langchain_quota.middleware.calls import OF_RUN, OF_THREAD, Change, Step, Update, model_counts
from langchain_quota.middleware.conclude import conclude_model, conclude_tools, end_again
from langchain_quota.middleware.context import call_context
from langchain_quota.middleware.feature import Handler, Request
from langchain_quota.middleware.history import newest_name
from langchain_quota.middleware.state import (
    LEDGER,
    RUN_MODEL,
    RUN_TOOLS,
    THREAD_MODEL,
    THREAD_TOOLS,
    Ledger,
    ModelCallLimitState,
    State,
    ToolCallLimitState,
    ledger,
    merge_ledgers,
    run_model,
)
from langchain_quota.runtime.arguments import explain_arguments, validate_choice, validate_type
from langchain_quota.runtime.sync_async import Mode, run_sync
from langchain_quota.telemetry import Telemetry

OnPending = Literal["skip", "raise"]


@explain_arguments('ToolCallLimitMiddleware(tool_name="search", run_limit=5)')
class ToolCallLimitMiddleware(
    LimitMiddleware[Any, ContextT, ResponseT], Generic[ResponseT, ContextT]
):
    """Limits how many tool calls an agent's thread and run may make, and makes each visible.

    A drop-in for LangChain's middleware of the same name: the same arguments, state keys, messages
    and exceptions; `limit_name`, `message`, `alert`, `on_pending` and `telemetry` are ours.

    Args:
        tool_name: The tool that is limited; `None` limits all tools together.
        thread_limit: Most calls over the life of a thread, a whole number from 0 (0 refuses every
            call); `None` for no limit. It needs a checkpointer, which keeps the count.
        run_limit: Most calls in one run (one invocation), or `None`; at most `thread_limit`.
        exit_behavior: What a call over the limit does. `"continue"` answers it with an error
            message and lets the agent go on; `"end"` ends the run with a message, and answers
            every call that is still pending; `"error"` raises `ToolCallLimitExceededError`.
        limit_name: The limit's name in metrics and spans, 1 to 64 printable characters; by
            default `tool:<tool_name>`, or `tool:*`. Give names to put two limits on one tool.
        message: What the model reads as the answer of a refused call (and, with `"end"`, the
            user as the final message) instead of the default text: a text, or a function from
            the `Decision` to a text.
        alert: Whether a refusal is worth an alert; `False` for a limit that is meant to be hit.
        on_pending: What `"end"` does when calls of other tools are pending in the same message:
            `"skip"` answers them as not run, `"raise"` raises `NotImplementedError`, as LangChain
            up to 1.3.14 did.
        telemetry: Where decisions are made visible; by default shared by the process, on
            Prometheus' global registry and OpenTelemetry's global tracer provider.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: No limit is given, `run_limit` exceeds `thread_limit`, or an argument is out
            of bounds. The message names the argument and the value.

    Examples:
        >>> from langchain_quota import ToolCallLimitMiddleware
        >>> limiter = ToolCallLimitMiddleware(tool_name="search", thread_limit=20, run_limit=3)
    """

    state_schema: type[ToolCallLimitState] = ToolCallLimitState
    feature_kinds = (CountWarnings, Unchecked)

    def __init__(  # noqa: PLR0913 - LangChain's keyword arguments, and ours
        self,
        *,
        tool_name: str | None = None,
        thread_limit: int | None = None,
        run_limit: int | None = None,
        exit_behavior: ExitBehavior = "continue",
        limit_name: str | None = None,
        message: str | Callable[[Decision], str] | None = None,
        alert: bool = True,
        on_pending: OnPending = "skip",
        telemetry: Telemetry | None = None,
    ) -> None:
        validate_choice("on_pending", on_pending, ("skip", "raise"))
        validate_choice("exit_behavior", exit_behavior, ("continue", "error", "end"))
        validate_type("tool_name", tool_name, str | None, "a string or None")
        _check_given(thread_limit, run_limit)
        limit = ToolCallLimit(
            tool_name,
            thread_limit=thread_limit,
            run_limit=run_limit,
            exit_behavior=exit_behavior,
            message=message,
            alert=alert,
            name="" if limit_name is None else limit_name,
        )
        super().__init__(
            (limit,), parts=(tool_name, limit_name), telemetry=telemetry, checks_every_call=False
        )
        self.kernel.conclude_tools = self._conclude_tools
        self.tool_name = tool_name
        self.thread_limit = thread_limit
        self.run_limit = run_limit
        self.exit_behavior = exit_behavior
        self._on_pending = on_pending
        if not may_end_runs(self.limits):
            self.remove_hooks(["wrap_model_call"])

    @hook_config(can_jump_to=["end"])
    def after_model(
        self, state: ToolCallLimitState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Check the tool calls that the model just made.

        Raises:
            ToolCallLimitExceededError: A call is over the limit and `exit_behavior` is `"error"`.
            NotImplementedError: Calls of other tools are pending and `on_pending` is `"raise"`.
        """
        return run_sync(self.kernel.after_model("", state, runtime))

    @hook_config(can_jump_to=["end"])
    async def aafter_model(
        self, state: ToolCallLimitState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Call `after_model` without blocking the event loop."""
        return await self.kernel.after_model("a", state, runtime)

    def _conclude_tools(self, step: Step) -> Change:
        change = conclude_tools(step)
        verdicts, update = change.verdicts, change.update
        if self._on_pending == "raise" and step.result.stopped and update is not None:
            pending = {str(verdict.call.tool) for verdict in verdicts if not verdict.plan.rules}
            if pending:
                error = NotImplementedError(
                    "Cannot end the run with other tool calls pending: "
                    f"{', '.join(sorted(pending))}. "
                    "Use on_pending='skip', or exit_behavior 'continue' or 'error'"
                )
                return Change(verdicts, error=error)
        if update is not None and THREAD_TOOLS in update:
            # LangChain's count of the run has the refused calls, too.
            update[RUN_TOOLS] = attempted = {**(step.state.get(RUN_TOOLS) or {})}
            for counter in (name for plan in step.plans for name in plan.counters):
                attempted[counter] = attempted.get(counter, 0) + 1
        return change


@explain_arguments("ModelCallLimitMiddleware(run_limit=10)")
class ModelCallLimitMiddleware(
    LimitMiddleware[Any, ContextT, ResponseT], Generic[ResponseT, ContextT]
):
    """Limits how many model calls an agent's thread and run may make, and makes each visible.

    A drop-in for LangChain's middleware of the same name: the same arguments, state keys,
    messages and exceptions; `limit_name`, `message`, `alert` and `telemetry` are ours. A call is
    checked before the model is called, and counted when the model has returned: a call that raises
    is not counted, a call retried within one step counts once.

    Args:
        thread_limit: As in `ToolCallLimitMiddleware`.
        run_limit: Most calls in one run (one invocation), or `None`.
        exit_behavior: What a call over the limit does: `"end"` ends the run with a message,
            `"error"` raises `ModelCallLimitExceededError`.
        limit_name: As in `ToolCallLimitMiddleware`; by default `model`.
        message: The final message instead of the default text: a text, or a function from the
            `Decision` to a text.
        alert: As in `ToolCallLimitMiddleware`.
        telemetry: The same.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: No limit is given, or an argument is out of bounds. The message names the
            argument and the value.

    Examples:
        >>> from langchain_quota import ModelCallLimitMiddleware
        >>> limiter = ModelCallLimitMiddleware(run_limit=10)
    """

    state_schema: type[ModelCallLimitState] = ModelCallLimitState
    feature_kinds = (CountWarnings, DeepAgents, Unchecked)

    def __init__(  # noqa: PLR0913 - LangChain's keyword arguments, and ours
        self,
        *,
        thread_limit: int | None = None,
        run_limit: int | None = None,
        exit_behavior: Literal["end", "error"] = "end",
        limit_name: str | None = None,
        message: str | Callable[[Decision], str] | None = None,
        alert: bool = True,
        telemetry: Telemetry | None = None,
    ) -> None:
        _check_given(thread_limit, run_limit)
        validate_choice("exit_behavior", exit_behavior, ("end", "error"))
        limit = ModelCallLimit(
            thread_limit=thread_limit,
            run_limit=run_limit,
            exit_behavior=exit_behavior,
            message=message,
            alert=alert,
            name="" if limit_name is None else limit_name,
        )
        super().__init__(
            (limit,), parts=(limit_name,), telemetry=telemetry, counts_models="returned"
        )
        self.kernel.conclude_model = partial(conclude_model, charging=False)
        self.thread_limit = thread_limit
        self.run_limit = run_limit
        self.exit_behavior = exit_behavior

    @hook_config(can_jump_to=["end"])
    def before_model(
        self, state: ModelCallLimitState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Check the model call that is about to be made.

        Raises:
            ModelCallLimitExceededError: The limit is reached and `exit_behavior` is `"error"`.
        """
        return self._check_next(state, runtime)

    @hook_config(can_jump_to=["end"])
    async def abefore_model(
        self, state: ModelCallLimitState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Call `before_model` without blocking the event loop."""
        return self._check_next(state, runtime)

    def after_model(
        self, state: ModelCallLimitState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Count the call, unless it was counted in the model's step."""
        return self._count_uncounted(state, runtime)

    async def aafter_model(
        self, state: ModelCallLimitState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Call `after_model` without blocking the event loop."""
        return self._count_uncounted(state, runtime)

    def _check_next(self, state: State, runtime: object) -> Update | None:
        if ended := end_again(state, runtime):
            return ended
        update = run_sync(self.kernel.check_model_call("", state, runtime)) or {}
        if "jump_to" not in update and _is_counted(state):
            begins = Ledger(counts={"model_counted": False})
            update[LEDGER] = merge_ledgers(update.get(LEDGER, {}), begins)
        return update or None

    async def _call_model(self, mode: Mode, request: Request, handler: Handler) -> WrittenResponse:
        # It is counted in the model's own step, so that no jump can skip it.
        response = await super()._call_model(mode, request, handler)
        update = self._count(request.state, request.runtime, newest_name(response.result))
        return WrittenResponse(response, update)

    def _count_uncounted(
        self, state: ModelCallLimitState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update:
        self.kernel.learn_answer(state, saved=True)
        if _is_counted(state):
            return {RUN_MODEL: run_model(state)}
        attempted = int(state.get("run_model_call_count") or 0) + 1
        name = newest_name(state.get("messages") or ())
        return {**self._count(state, runtime, name), RUN_MODEL: attempted}

    def _count(self, state: State, runtime: object, name: str | None) -> Update:
        context = call_context(runtime).answered_by(name)
        call = Call("model", agent=context.agent, thread_id=context.thread_id)
        plan = self.kernel.resolver.fixed["model"][0].plan_for(call)
        counts = model_counts(state)
        charge = Verdict.of_charge(call, plan, counts, call.amount, {})
        # Two limiters count one call in one task.
        self.kernel.recorder.record_charge(charge, task_id=context.task(self.name))
        of_thread, of_run = counts[OF_THREAD] + call.amount, counts[OF_RUN] + call.amount
        written = Ledger(counts={"run_model": of_run, "model_counted": True})
        return {THREAD_MODEL: of_thread, LEDGER: written}


def _is_counted(state: State) -> bool:
    """Return whether the model call of this step is counted already."""
    return ledger(state).get("counts", {}).get("model_counted", False)


def _check_given(*limits: object) -> None:
    """Check that there is a limit, with the message of LangChain's limiters."""
    if limits == (None, None):
        raise ValueError("At least one limit must be specified (thread_limit or run_limit)")

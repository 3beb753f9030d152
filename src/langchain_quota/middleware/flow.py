"""Check the calls of every middleware, record the decisions, and make the calls."""

from collections import Counter as Counts
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import cached_property, partial
from typing import Literal, Self

from langchain.agents.middleware.types import ToolCallRequest

from langchain_quota.core.admission import AcquireRequest, Correction
from langchain_quota.core.decision import Outcome
from langchain_quota.core.plans import LimitSet, OnStoreError, Places, run_counter, thread_counter
from langchain_quota.core.stops import request_runs
from langchain_quota.limits import Limit
from langchain_quota.limits.call import Kind
from langchain_quota.middleware.calls import (
    Change,
    Step,
    Update,
    model_counts,
    model_step,
    refund_corrections,
    tool_step,
)
from langchain_quota.middleware.conclude import (
    add_reasons,
    conclude_model,
    conclude_tools,
    not_concluded,
)
from langchain_quota.middleware.context import CallContext, call_context
from langchain_quota.middleware.damage import DAMAGES, raise_if_damaged
from langchain_quota.middleware.feature import (
    Feature,
    FeatureOptions,
    Handler,
    Middleware,
    ModelCall,
    Request,
    Response,
    StepCheck,
    ToolAnswer,
    ToolHandler,
    overriding,
)
from langchain_quota.middleware.near import NearShares
from langchain_quota.middleware.resolver import LimitResolver
from langchain_quota.middleware.state import Ledger, State, ledger, run_tools, thread_tools
from langchain_quota.middleware.store_client import StoreClient, undoing
from langchain_quota.middleware.thread_usage import with_work
from langchain_quota.runtime import compat
from langchain_quota.runtime.arguments import UserLine
from langchain_quota.runtime.store_errors import QuotaStoreError
from langchain_quota.runtime.sync_async import Mode
from langchain_quota.stores import QuotaStore
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.telemetry import Telemetry, recorder_of
from langchain_quota.telemetry.observers import NearFunction, Observer, Observers

STORE_UNAVAILABLE = (
    "the store could not be asked, and the answer of a person waits for it: resume the run again "
    "when the store answers; the answer is kept"
)
"""The message if the store that has to grant a person's answer is unavailable."""

WhenCounted = Literal["admitted", "returned"]
Conclude = Callable[[Step], Change]
Checking = Coroutine[object, None, Update | None]
"""A check that has to be awaited; it returns the update of the state."""


class Kernel:
    """The flow behind the hooks of one middleware, and what its features use.

    Args:
        middleware: The middleware whose hooks call the kernel.
        limits: The limits, checked together.
        telemetry: Where decisions are recorded; `None` for the process's default.
        store: Where runs share counts, if they do.
        on_store_error: What happens to calls while the store is unavailable.
        on_decision: The user's functions that get every decision.
        on_near: The user's function that is told of shares that are used.
        options: The settings of features, by name.
        feature_kinds: The features that it may have, in the order in which they are called.
        counts_models: When this middleware counts model calls; `None` if it does not.
        checks_every_call: Whether tool calls that no limit matches are recorded, too.
        why_nobody_is_asked: What the middleware needs instead, if no limit of it can ask a person.
        checks_inline: Whether calls are checked in the model's own node.
        stream_events: Whether crossings and refusals are events in the run's stream.

    Raises:
        TypeError: `telemetry` has the wrong type.
    """

    def __init__(  # noqa: PLR0913 - keyword-only, with defaults
        self,
        middleware: Middleware,
        limits: tuple[Limit, ...],
        *,
        telemetry: Telemetry | None,
        store: QuotaStore | None = None,
        on_store_error: OnStoreError = "block",
        on_decision: Observer | Sequence[Observer] = (),
        on_near: NearFunction | None = None,
        options: FeatureOptions | None = None,
        feature_kinds: Sequence[type[Feature]] = (),
        counts_models: WhenCounted | None = None,
        checks_every_call: bool = True,
        why_nobody_is_asked: str = "",
        checks_inline: bool = False,
        stream_events: bool = False,
    ) -> None:
        self.created_at = UserLine.of_caller()
        self.limits = limits
        self.kinds = {kind for limit in limits for kind in limit.kinds}
        self.recorder = recorder_of(telemetry)
        if stream_events:
            self.recorder = self.recorder.streaming()
        self.recorder.watch_limits(limits, in_memory=isinstance(store, MemoryStore))
        self.observers = Observers(on_decision, self.recorder)
        self.store = None if store is None else StoreClient(store, self.recorder)
        self.near = NearShares(limits, on_near, self.recorder, self.store)
        self.on_store_error: OnStoreError = on_store_error
        self.options = options or FeatureOptions()
        # What follows from a result; the drop-ins have their own.
        self.conclude_model: Conclude = conclude_model
        self.conclude_tools: Conclude = conclude_tools
        self.middleware = middleware
        self.counts_models = counts_models
        self._checks_every_call = checks_every_call
        self.why_nobody_is_asked = why_nobody_is_asked
        self.checks_inline = checks_inline
        self.runs_tools = True
        """Whether the kernel is around the tools that run. A graph may have its own tool node."""
        self.repeats_model_calls = True
        """Whether a node that runs again repeats its model call; in a graph it makes a new one."""
        self.resolver = LimitResolver(limits, self.recorder, self.store)
        created = [kind.create(self) for kind in feature_kinds]
        features = [feature for feature in created if feature is not None]
        self._feature_shapes_requests = any(feature.shapes_requests for feature in features)
        self.begin_run_hooks = overriding(features, Feature.begin_run)
        self.end_run_hooks = overriding(features, Feature.end_run)
        self._state_counts_hooks = overriding(features, Feature.state_counts)
        self.adjust_limits_hooks = overriding(features, Feature.adjust_limits)
        self.prepare_hooks = overriding(features, Feature.prepare)
        self.admit: StepCheck = self._admit_by_counts
        """Checks a step, perhaps after a wait and a question to a person."""
        for admit in reversed(overriding(features, Feature.admit)):
            self.admit = partial(admit, admit=self.admit)
        self.conclude_hooks = overriding(features, Feature.conclude)
        self.shape_request_hooks = overriding(features, Feature.shape_request)
        self.around_model_hooks = overriding(features, Feature.around_model)
        self.after_model_hooks = overriding(features, Feature.after_model)
        self.around_tool_hooks = overriding(features, Feature.around_tool)

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Share the kernel with a copy of its middleware: locks and clients have no copies."""
        return self

    @cached_property
    def name(self) -> str:
        """The middleware's name in the graph."""
        return str(self.middleware.name)

    def end_run(self, state: State, runtime: object) -> None:
        """Pass the final state of a run that has ended to features."""
        for end_run in self.end_run_hooks:
            end_run(state, runtime)

    def state_counts(self, state: State, limits: Iterable[Limit]) -> dict[str, int]:
        """Return the state's counts, and those that only features know, by the counter's name."""
        thread, run, counts = thread_tools(state), run_tools(state), model_counts(state)
        for limit in limits:
            if limit.kind == "tool":
                counts[thread_counter(limit)] = thread.get(limit.counter, 0)
                counts[run_counter(limit)] = run.get(limit.counter, 0)
        for count_more in self._state_counts_hooks:
            counts |= count_more(state)
        return counts

    async def resolve_limits(
        self,
        mode: Mode,
        kind: Kind | None,
        state: State,
        runtime: object,
        caller: CallContext | None = None,
    ) -> tuple[LimitSet, Places]:
        """Return the limits on calls of a kind, or on all calls, and where their counts are now."""
        resolved = self.resolver.fixed.get(kind)
        if resolved is None:
            caller = caller or call_context(runtime)
            resolved = await self.resolver.resolve(mode, kind, state, runtime, caller)
        limits, places = resolved
        for adjust in self.adjust_limits_hooks:
            limits = adjust(state, limits, places)
        return limits, places

    def check_model_call(
        self, mode: Mode, state: State, runtime: object, request: Request | None = None
    ) -> Checking:
        """Check the next model call, with its request if it is there; return the update."""
        model = None if request is None else (request.model, request.model_settings)
        make = partial(model_step, task=self.name, model=model)
        return self._check(mode, "model", state, runtime, make, self.conclude_model)

    def check_tool_calls(
        self, mode: Mode, state: State, runtime: object, *, task: str = ""
    ) -> Checking:
        """Check the newest tool calls, and return the update."""
        every_call = self._checks_every_call
        make = partial(tool_step, middleware=self.name, every_call=every_call, task=task)
        return self._check(mode, "tool", state, runtime, make, self.conclude_tools)

    async def _check(  # noqa: PLR0913, PLR0917 - what a hook knows
        self,
        mode: Mode,
        kind: Kind,
        state: State,
        runtime: object,
        make: Callable[[State, object, CallContext, LimitSet, Places], Step | None],
        conclude: Conclude,
    ) -> Update | None:
        """Check the calls of a step, record the decisions, and return the update or raise."""
        try:
            # After the last call of a budget no tool runs, even where no limit is on tools.
            if kind not in self.kinds and not (kind == "tool" and ledger(state).get("final")):
                return None
            context = call_context(runtime)
            limits, places = await self.resolve_limits(mode, kind, state, runtime, context)
            step = make(state, runtime, context, limits, places)
            if step is None:
                return None
            step = await self.admit(mode, await self.prepared(mode, step))
            corrections: tuple[Correction, ...] = ()
            try:
                change = conclude(step)
            except Exception as error:  # noqa: BLE001 - a text of the user's own may raise anything
                raise_if_damaged(state, error)
                change = not_concluded(step, error)
                if step.answered and step.sent is not None:
                    corrections = undoing(step.sent)
            if step.counts and step.counts.refunds and not change.error:
                name = step.context.step(f"{step.task}.refused")
                corrections = refund_corrections(name, step.counts.refunds)
            for complete in self.conclude_hooks:
                change = complete(step, change)
            if corrections:
                update = await self.record_and_correct(mode, step, change, corrections)
            else:
                update = await self.record(mode, step, change)
        except DAMAGES as error:
            raise_if_damaged(state, error)
            raise
        if change.error is not None:
            raise with_work(change.error, state)
        return update

    def after_model(self, mode: Mode, state: State, runtime: object) -> Checking:
        """Pass the newest state to features, then check the newest tool calls."""
        if self.after_model_hooks:
            self.learn_answer(state, saved=True)
        return self.check_tool_calls(mode, state, runtime)

    def learn_answer(self, state: State, *, saved: bool) -> None:
        """Pass the state after the model's step to features."""
        for after_model in self.after_model_hooks:
            after_model(state, saved=saved)

    async def prepared(self, mode: Mode, step: Step) -> Step:
        """Return a step with what the features know of its calls."""
        for prepare in self.prepare_hooks:
            step = await prepare(mode, step)
        return step

    async def _admit_by_counts(self, mode: Mode, step: Step) -> Step:
        """Check a step by the store's counts, or by the state's if the store has none of them."""
        if self.store is None or not any(plan.shared for plan in step.plans):
            return step.by_state()
        # Raise configuration errors before anything is charged.
        self.observers.check(mode)
        sent = step.request()
        result = await self.store.acquire(mode, sent)
        if result is None:
            # The store's client has counted and logged why.
            return self._without_store(step, sent, self.store)
        step = step.by_store(sent, result)
        if result.newly_granted:
            new = step.limits.newly_raised(result.newly_granted)
            self.recorder.record_grants(step.context.agent, new)
        return step

    def _without_store(self, step: Step, sent: AcquireRequest, store: StoreClient) -> Step:
        """Check a step while the store is unavailable; allowed calls are charged there later."""
        if step.answer is not None or (step.limits.asking and compat.is_answered()):
            # A run that is resumed with a person's answer can be resumed again. What it repeats is
            # not undone: a store answers a repeated request as it answered the first one.
            if step.pending is None and not self.repeats_model_calls:
                store.correct_later(sent)
            raise QuotaStoreError(STORE_UNAVAILABLE)
        calls = sum(plan.shared for plan in step.plans)
        step = step.without_store(sent, self.on_store_error)
        # A reservation is not charged: the use is charged when it is known.
        held = {name for name, counter in sent.counters.items() if counter.lease is not None}
        # With "block" a call runs only if limits in a dry run alone refuse it.
        ran = Counts[str]()
        for demand, admitted in zip(sent.demands, step.result.admitted, strict=True):
            if admitted and not step.result.stopped:
                ran.update(
                    sent.keyed({name: n for name, n in demand.amounts.items() if name not in held})
                )
        # The request is refunded if the store did charge it.
        store.correct_later(sent, ran)
        agent = step.context.agent
        self.recorder.record_fallback(agent, store.label, self.on_store_error, calls)
        return step

    async def record_and_correct(
        self, mode: Mode, step: Step, change: Change, corrections: tuple[Correction, ...]
    ) -> Update | None:
        """Record the decisions, and correct what the agent's store was charged for the calls."""
        # If the run is cancelled meanwhile, both have happened.
        try:
            return await self.record(mode, step, change)
        finally:
            # Another middleware may have charged them. Its store is only found in the process in
            # which the run began.
            client = self.store or StoreClient.by_name.get(step.ledger.get("store") or "")
            if client is not None and corrections:
                await client.settle(mode, AcquireRequest("", "", corrections=corrections))

    async def record(self, mode: Mode, step: Step, change: Change) -> Update | None:
        """Record the decisions unless the task is a re-run, and return the update."""
        if self.observers.present:
            self.observers.check(mode)
        if step.written:
            change = change.writing(step.written)
        reason = add_reasons(step, change, self.recorder.subject_label)
        noted = request_runs.get()
        if noted is not None:
            noted.checked = True
        if not (noted is None or reason is None or change.error or step.context.is_nested):
            # A run that a person has ended was not refused.
            blocked = (one for one in change.verdicts if one.outcome is Outcome.BLOCKED)
            noted.refusals += [one.decision for one in blocked if one.answer is None]
        ending = reason["limit"] if reason else ""
        if change.error is not None:
            refusals = (status for one in change.verdicts for status in one.refused_by)
            ending = next((status.limit for status in refusals if status.enforced), "")
        record = self.recorder.record(
            change.verdicts,
            started=step.started,
            error=change.error,
            ended_by=ending,
            task_id=step.context.task(step.task),
            model=change.model or step.model,
            refunds=change.refunds,
            ending=reason,
        )
        if self.observers.present:
            made = [one.whole_decision for one in change.verdicts if not one.needs_slot]
            await self.observers.notify(mode, made, record)
        if self.near.present and record.is_new:
            return await self._tell_near(step, change)
        return change.update

    async def _tell_near(self, step: Step, change: Change) -> Update | None:
        """Tell of shares that calls have newly used, and return the update."""
        # While the store is unavailable, nobody knows what was told.
        if step.sent is not None and not step.answered:
            return change.update
        told = {**step.ledger.get("near", {})}
        await self.near.tell(change.verdicts, told)
        return change.writing(Ledger(near=told)).update if told else change.update

    async def call_model(
        self, mode: Mode, request: Request, handler: Handler, written: Update
    ) -> Response | None:
        """Make an allowed model call; return `None` if it is blocked now."""
        call: ModelCall = handler
        if self.shape_request_hooks and not self._feature_shapes_requests:
            call = partial(self._call_shaped, mode, handler)
        for around_model in reversed(self.around_model_hooks):
            call = partial(around_model, mode, call=call, written=written)
        return await call(request)

    async def _call_shaped(self, mode: Mode, handler: Handler, request: Request) -> Response:
        return await handler(await self.shape_request(mode, request))

    async def shape_request(self, mode: Mode, request: Request) -> Request:
        """Return the request that the model gets."""
        for shape in self.shape_request_hooks:
            request = await shape(mode, request)
        return request

    async def call_tool(
        self, mode: Mode, request: ToolCallRequest, call: ToolHandler
    ) -> ToolAnswer:
        """Make a tool call that is allowed, inside what the features do around it."""
        for around_tool in reversed(self.around_tool_hooks):
            call = partial(around_tool, mode, call=call)
        return await call(request)

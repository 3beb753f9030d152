"""What the middlewares of many limits share: arguments, judging, the store, requests, reset."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Generic

from langchain.agents.middleware.types import (
    ModelRequest,
    ResponseT,
)
from langchain_core.runnables import RunnableConfig
from langgraph.constants import END
from langgraph.pregel import Pregel
from langgraph.types import PregelTask

from langchain_quota.decision import Kind
from langchain_quota.engine import Limits, Outage, Used
from langchain_quota.limits import (
    Limit,
    Terms,
    check_choice,
    check_together,
)
from langchain_quota.middleware.case import Case
from langchain_quota.middleware.dynamic import aterms_now, terms_now
from langchain_quota.middleware.limiter import Limiter
from langchain_quota.middleware.observers import Observer, Observers
from langchain_quota.middleware.origin import Origin
from langchain_quota.middleware.requests import (
    last_call,
    remaining,
    with_note,
    without_exhausted,
)
from langchain_quota.middleware.resetting import check_at_rest, own_node, thread_keys
from langchain_quota.middleware.rulings import Ruling, Update
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.middleware.typevars import ContextT
from langchain_quota.state import (
    UNUSED,
    QuotaState,
    ledger,
    run_model,
    run_tools,
    thread_model,
    thread_tools,
)
from langchain_quota.stores import QuotaStore
from langchain_quota.telemetry import Telemetry


class Quotas(Limiter[Any, ContextT, ResponseT], Generic[ContextT, ResponseT]):
    """Holds an agent to many limits at once; arguments and errors as of `QuotaMiddleware`."""

    state_schema: type[QuotaState[Any]] = QuotaState

    def __init__(  # noqa: PLR0913 - keyword-only settings with defaults
        self,
        limits: Sequence[Limit],
        *,
        tell_model: bool = False,
        hide_exhausted: bool = False,
        on_decision: Observer | Sequence[Observer] = (),
        store: QuotaStore | None = None,
        on_store_error: Outage = "deny",
        telemetry: Telemetry | None = None,
    ) -> None:
        check_together(limits)
        check_choice("on_store_error", on_store_error, ("deny", "allow"))
        if store is not None and (isinstance(store, type) or not isinstance(store, QuotaStore)):
            given: object = store
            # Not the value of a URL: it may hold a password.
            shown = "a string: RedisStore(url) is one" if isinstance(given, str) else repr(given)
            raise TypeError(f"store must be a QuotaStore or None, not {shown}")
        for limit in limits:
            if store is None and limit.quotas:
                raise ValueError(
                    f"limit {limit.name!r} has quotas: give a store that counts them, "
                    "store=MemoryStore() in one process, store=RedisStore() in several"
                )
        for argument, value in (("tell_model", tell_model), ("hide_exhausted", hide_exhausted)):
            if not isinstance(value, bool):
                raise TypeError(f"{argument} must be True or False, not {value!r}")
        super().__init__(tuple(limits), limit_name=None, telemetry=telemetry)
        self._observers = Observers(on_decision, self._recorder)
        if store is not None:
            self._remedy = (
                'Call the agent with {"configurable": {"thread_id": …}}: the store counts by it'
            )
        self._store = None if store is None else StoreClient(store, self._recorder)
        self._on_store_error: Outage = on_store_error
        self._clock = time.time
        self._tell_model = tell_model
        self._hide_exhausted = hide_exhausted
        self._tells = tell_model or hide_exhausted
        self._shapes_requests = (
            tell_model
            or hide_exhausted
            or any(limit.exit_behavior == "finalize" for limit in limits)
        )
        self._limits_of: dict[Kind | None, list[Limit]] = {
            "model": [limit for limit in limits if limit.kind == "model"],
            "tool": [limit for limit in limits if limit.kind == "tool"],
            None: [*limits],
        }
        self._model_mode = "admitted" if self._limits_of["model"] else None
        # Terms that are the same at every moment.
        self._fixed: dict[Kind | None, Limits] = {}
        if store is None and not any(limit.is_dynamic for limit in limits):
            self._fixed = {
                kind: Limits(map(Terms.of, each)) for kind, each in self._limits_of.items()
            }

    @property
    def name(self) -> str:
        """The middleware's name in the graph: that of the class."""
        return type(self).__name__

    def reset(self, agent: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> None:
        """Set what a thread has used back to nothing, in its state and in the store.

        Args:
            agent: The agent, as `create_agent` made it with this middleware.
            config: Names the thread: `{"configurable": {"thread_id": …}}`.

        Raises:
            TypeError: The agent runs elsewhere.
            ValueError: The agent does not have this middleware.
            RuntimeError: The thread has no state, or waits in mid-run (interrupted, or failed
                elsewhere than at a limit).
            QuotaStoreError: The store could not be asked.
        """
        node = own_node(agent, self.name)
        check_at_rest(agent.get_state(config), config, self._stopped_at_a_limit)
        if self._store is not None:
            self._store.reset(thread_keys(self._limits, config, self._clock()))
        agent.update_state(config, dict(UNUSED), as_node=node)
        # What the update made the graph want to run next.
        agent.update_state(config, None, as_node=END)
        self._forget(agent, config)

    async def areset(self, agent: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> None:
        """Set what a thread has used back to nothing, in its state and in the store.

        Args:
            agent: The agent, as `create_agent` made it with this middleware.
            config: Names the thread: `{"configurable": {"thread_id": …}}`.

        Raises:
            TypeError: The agent runs elsewhere.
            ValueError: The agent does not have this middleware.
            RuntimeError: The thread has no state, or waits in mid-run (interrupted, or failed
                elsewhere than at a limit).
            QuotaStoreError: The store could not be asked.
        """
        node = own_node(agent, self.name)
        check_at_rest(await agent.aget_state(config), config, self._stopped_at_a_limit)
        if self._store is not None:
            await self._store.areset(thread_keys(self._limits, config, self._clock()))
        await agent.aupdate_state(config, dict(UNUSED), as_node=node)
        # What the update made the graph want to run next.
        await agent.aupdate_state(config, None, as_node=END)
        self._forget(agent, config)

    def _stopped_at_a_limit(self, task: PregelTask) -> bool:
        """Whether a task failed because a limit ended the run with an exception."""
        return task.error is not None and task.name in {
            f"{self.name}.before_model",
            f"{self.name}.after_model",
        }

    def _forget(self, agent: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> None:
        name = ((agent.config or {}).get("metadata") or {}).get("lc_agent_name")
        self._recorder.forget(name, config.get("configurable", {}).get("thread_id"))

    def _terms_now(self, kind: Kind | None, state: Any, runtime: Any) -> Limits:
        """The limits on calls of a kind, or all of them, as they are at this moment."""
        if self._fixed:
            return self._fixed[kind]
        now = None if self._store is None else self._clock()
        limits = self._limits_of[kind]
        return Limits(terms_now(limits, state, runtime, self._recorder, now=now))

    async def _aterms_now(self, kind: Kind | None, state: Any, runtime: Any) -> Limits:
        """The limits on calls of a kind, or all of them, as they are at this moment."""
        if self._fixed:
            return self._fixed[kind]
        now = None if self._store is None else self._clock()
        limits = self._limits_of[kind]
        return Limits(await aterms_now(limits, state, runtime, self._recorder, now=now))

    def _judge(self, case: Case) -> Ruling:
        """Judge calls, by the store's counts where there are any."""
        if self._store is None or not case.shared:
            return case.rule()
        # Nothing is charged for what would then fail.
        self._observers.refuse_async()
        grant = self._store.reserve(case.plan.reservation)
        return self._judge_alone(case) if grant is None else case.rule(grant)

    async def _ajudge(self, case: Case) -> Ruling:
        """Judge calls, by the store's counts where there are any."""
        if self._store is None or not case.shared:
            return case.rule()
        grant = await self._store.areserve(case.plan.reservation)
        return self._judge_alone(case) if grant is None else case.rule(grant)

    def _judge_alone(self, case: Case) -> Ruling:
        """Judge calls while the store cannot be asked."""
        store = self._store
        assert store is not None  # noqa: S101 - for the type checker: only then it was asked
        alone = case.without_store(self._on_store_error)
        grant = alone.plan.own_grant()
        ran: dict[str, int] = {}
        # Denied, there can be calls of limits that are not enforced.
        if not grant.stopped:
            for charge, admitted in enumerate(grant.admitted):
                for key, amount in case.plan.keyed(charge).items() if admitted else ():
                    ran[key] = ran.get(key, 0) + amount
        store.settle_later(case.plan.reservation, ran)
        needing = [each for each in case.plan.terms if each.shared]
        calls = sum(any(each.limit.matches(call) for each in needing) for call in case.plan.calls)
        self._recorder.record_fallback(case.plan.calls[0].agent, self._on_store_error, calls)
        return alone.rule(grant)

    def _counts_last(self, caller: Origin) -> bool:
        """Whether the counts of threads outlive the run."""
        in_store = self._store is not None and caller.run_thread_id is not None
        return in_store or super()._counts_last(caller)

    def _shape(self, request: ModelRequest[ContextT]) -> ModelRequest[ContextT]:
        """The request as the model gets it: told what is left, offered what it may call."""
        terms = self._terms_now(None, request.state, request.runtime).terms
        kept = self._store.peek(_keys(terms)) if self._store and self._tells else {}
        return self._shaped(request, terms, kept)

    async def _ashape(self, request: ModelRequest[ContextT]) -> ModelRequest[ContextT]:
        """The request as the model gets it: told what is left, offered what it may call."""
        terms = (await self._aterms_now(None, request.state, request.runtime)).terms
        kept = await self._store.apeek(_keys(terms)) if self._store and self._tells else {}
        return self._shaped(request, terms, kept)

    def _shaped(
        self,
        request: ModelRequest[ContextT],
        terms: Sequence[Terms],
        kept: Mapping[str, int] | None,
    ) -> ModelRequest[ContextT]:
        state: Mapping[str, Any] = request.state
        if ledger(state).get("final"):
            return last_call(request)
        usage = _usage(state, terms, kept)
        notes = []
        if self._tell_model:
            notes.append(remaining(terms, usage, near=self._recorder.near))
        if self._hide_exhausted:
            request, note = without_exhausted(request, terms, usage)
            notes.append(note)
        text = " ".join(note for note in notes if note)
        return request.override(messages=with_note(request.messages, text)) if text else request

    def _emit(self, ruling: Ruling) -> Ruling:
        """Make a ruling visible on the sync path."""
        self._observers.refuse_async()
        emitted = super()._emit(ruling)
        self._observers.tell(ruling.decisions, ruling.task_id)
        return emitted

    async def _aconclude(self, ruling: Ruling | None) -> Update | None:
        """Make a ruling visible, and then let it take effect."""
        if ruling is None:
            return None
        emitted = super()._emit(ruling)
        if self._observers.present:
            await self._observers.atell(ruling.decisions, ruling.task_id)
        return self._effect(emitted)


def _keys(terms: Sequence[Terms]) -> list[str]:
    """Where a store keeps the counts of limits."""
    return sorted({key for each in terms for key in each.keys})


def _usage(
    state: Mapping[str, Any], terms: Sequence[Terms], kept: Mapping[str, int] | None
) -> dict[str, Used]:
    """The counts of each limit, by its name: the store's, and the state's for all others.

    Where the store did not answer, those of quotas are missing.
    """
    thread, run = thread_tools(state), run_tools(state)
    usage = {}
    for each in terms:
        counter = each.limit.counter
        used = (
            Used(thread_model(state), run_model(state))
            if each.limit.kind == "model"
            else Used(thread.get(counter, 0), run.get(counter, 0))
        )
        if kept is not None:
            used = Used(
                kept.get(each.thread_key or "", used.thread),
                kept.get(each.run_key or "", used.run),
                tuple(kept.get(quota.key, 0) for quota in each.quotas),
            )
        usage[each.limit.name] = used
    return usage

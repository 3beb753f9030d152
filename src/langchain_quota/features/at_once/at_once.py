"""Caps on calls at once: a tool call waits for its turn, runs, and makes room for the next one."""

from collections.abc import Collection, Sequence
from typing import Any

from langchain.agents.middleware.types import ToolCallRequest
from langchain_core.messages import ToolMessage

from langchain_quota import messages
from langchain_quota.admission import AcquireRequest, Compensation
from langchain_quota.concurrency import Form, ask
from langchain_quota.decision import Call, Decision, Outcome
from langchain_quota.features.at_once.turn import Turn
from langchain_quota.limits import Limit
from langchain_quota.limits.calls import ToolCallLimit
from langchain_quota.middleware.conclude import refunds_of
from langchain_quota.middleware.counts import owed_for
from langchain_quota.middleware.feature import Feature, ToolAnswer, ToolHandler
from langchain_quota.middleware.history import answer, answer_of_refused
from langchain_quota.rule import OnStoreError
from langchain_quota.stores.client import StoreClient
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.telemetry.observers import Observers
from langchain_quota.telemetry.recorder import Recorder


class AtOnce(Feature):
    """Holds tool calls to the number that may run at the same time, in this process or a store."""

    @classmethod
    def of(cls, limiter: Any) -> "AtOnce | None":
        """The caps of a middleware; `None` if it has none."""
        return cls(limiter) if cls.needs(limiter.limits) else None

    @classmethod
    def needs(cls, limits: Sequence[Limit]) -> Collection[str]:
        """The hook around tools, if a limit has a cap."""
        return ("wrap_tool_call",) if any(map(_cap, limits)) else ()

    def __init__(self, limiter: Any) -> None:
        self._limits: Sequence[ToolCallLimit] = [*filter(_cap, limiter.limits)]
        self._store: StoreClient | None = limiter._store  # noqa: SLF001 - the kernel gives these
        self._on_store_error: OnStoreError = limiter._on_store_error  # noqa: SLF001
        self._recorder: Recorder = limiter._recorder  # noqa: SLF001
        self._observers: Observers = limiter._observers  # noqa: SLF001
        # The store that keeps the places; `None` if this process keeps them. Before it is asked,
        # the calls of this process wait in line. So they keep their order, and it gets few
        # questions.
        in_process = self._store is None or isinstance(self._store.store, MemoryStore)
        self._leases = None if in_process else self._store

    async def around_tool(
        self, form: Form, request: ToolCallRequest, call: ToolHandler
    ) -> ToolAnswer:
        """Make a tool call when it may run; if its wait is over first, answer it instead."""
        made = Call("tool", request.tool_call["name"])
        limits = {each.name: each for each in self._limits if each.matches(made)}
        if not limits:
            return await call(request)
        turn = Turn(request, limits)
        try:
            answered = await self._begin(form, turn, request.tool)
            return answered or await call(turn.runs(form, request))
        finally:
            if turn.task_over():
                await turn.end(form)

    async def _begin(self, form: Form, turn: Turn, tool: Any) -> ToolMessage | None:
        """Wait for a call's places, visibly; the answer to a call that may not run."""
        try:
            await turn.wait(form, self._leases, tool)
        except BaseException:
            self._recorder.record_wait(turn.call.agent, turn.waited_for, "cancelled", turn.age)
            raise
        if turn.unchecked:
            self._recorder.record_fallback(turn.call.agent, self._on_store_error, 1)
        decision = turn.decision(self._on_store_error)
        self._recorder.record_turn(decision, turn.waited_for, turn.waited)
        if decision.outcome is not Outcome.ALLOWED:
            await ask(form, self._observers, "notify", [decision], None)
        if decision.outcome is not Outcome.BLOCKED:
            return None
        await self._refund(form, turn)
        return _answer(turn, decision)

    async def _refund(self, form: Form, turn: Turn) -> None:
        """Give back what the call was charged: it does not run."""
        # The state's counts are corrected when the next calls are judged: the answer says so. The
        # store's counts are corrected now, if the tool's state names them: other runs use them.
        batch, call_id = turn.batch, str(turn.call.id)
        charge = None if batch is None or turn.tried else batch["calls"].get(call_id)
        if batch is None or charge is None:
            return
        taken = [one for by_limit in charge["limits"].values() for one in by_limit.items()]
        self._recorder.record_refunds(refunds_of(turn.call, taken))
        owed = owed_for(batch["message"], call_id, charge)
        if self._store is not None and owed:
            made = tuple(
                Compensation(refund, {key: -amount for key, amount in amounts.items()})
                for refund, amounts in owed.items()
            )
            await self._store.settle(form, AcquireRequest("", "", compensations=made))


def _answer(turn: Turn, refusal: Decision) -> ToolMessage:
    """What the model reads in place of the tool's answer."""
    text = messages.refusal(refusal, turn.limits)
    call_id, tool = str(turn.call.id), turn.call.tool
    if turn.tried:
        return answer(call_id, tool, text)
    return answer_of_refused(call_id, tool, text, returned=turn.batch is not None)


def _cap(limit: Any) -> int | None:
    """How many calls a limit lets run at the same time, if it says so."""
    cap: int | None = getattr(limit, "at_once", None)
    return cap

"""Budgets in a loop that the user's code drives: who calls the model, and how that is charged.

A model that `call_model` calls is charged as in an agent. A model node of the user's own is charged
for all model runs in it, whether it calls `call_model` or the model itself. If nobody saw the call,
the use that its answer reports is charged when the tool calls are judged.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from langchain.agents.middleware.types import ModelRequest, ModelResponse
from langchain_core.messages import AIMessage

from langchain_quota.admission import AcquireResult
from langchain_quota.decision import Call
from langchain_quota.features.budgets.budgets import Budgets, Paid
from langchain_quota.features.budgets.model_runs import ModelRun, collect_answer, model_runs_so_far
from langchain_quota.features.budgets.prices import Prices, cost
from langchain_quota.features.budgets.settlements import given_back
from langchain_quota.limits import Limit
from langchain_quota.middleware._calls import Update
from langchain_quota.middleware._context import running_config
from langchain_quota.middleware._form import Form
from langchain_quota.middleware._model_calls import held_amounts, spending
from langchain_quota.resolved import ResolvedLimits
from langchain_quota.state import LEDGER, Held, Ledger, ledger, merge_ledgers


@dataclass
class _Step:
    """What happens in a model node of the user's own."""

    budgets: "LoopBudgets"
    task: str
    state: dict[str, Any]
    has_node: bool = True
    called: bool = False
    held: list[Held] = field(default_factory=list)
    written: Update = field(default_factory=dict)
    runs: Sequence[ModelRun] = field(default_factory=list)


_step: ContextVar[_Step | None] = ContextVar("model_node", default=None)


class LoopBudgets(Budgets):
    """Charges the model calls of a loop that is written by hand to its budgets."""

    def __init__(
        self, limits: Sequence[Limit], *, prices: Prices | None, allow_unknown: bool, **others: Any
    ) -> None:
        super().__init__(limits, prices=prices, allow_unknown=allow_unknown, **others)
        self._needed_prices = None if allow_unknown else prices
        # The request may never be seen: a number is held before it.
        self.bounds_calls = any(callable(getattr(limit, "reserve", None)) for limit in limits)

    def before_request(self, limits: ResolvedLimits) -> ResolvedLimits:
        """The limits that judge a call before its request is known: they hold a number already."""
        return limits

    async def call(
        self,
        form: Form,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
        limits: ResolvedLimits,
        held: Mapping[str, int],
    ) -> tuple[ModelResponse[Any], Update]:
        """Call the model. In a node of the user's own nothing else is done: the node is charged."""
        if self._is_charged_by_its_node(request):
            return await handler(request), {}
        return await super().call(form, request, handler, limits, held)

    async def run_node(  # noqa: PLR0913 - what a hook knows
        self,
        form: Form,
        state: Mapping[str, Any],
        runtime: Any,
        limits: ResolvedLimits,
        run: Callable[[], Awaitable[Any]],
        *,
        has_node: bool = True,
    ) -> tuple[Any, Update]:
        """Run a model node of the user's own; its result, and what is to be written."""
        with self._step(state, has_node=has_node) as step:

            async def handler(_: object) -> Any:
                result = await run()
                step.runs = model_runs_so_far()
                return result

            request = _without_model(step.state, runtime)
            held = held_amounts(limits.asked(Call("model")))
            try:
                result, update = await super().call(form, request, handler, limits, held)
            finally:
                await self.charge(form, given_back(step.held))
        self._check(step)
        return result, _charged(update, step.written)

    def unwritten(self, state: Mapping[str, Any]) -> Update | None:
        """What is to be written of calls that this process has charged; `None` for none."""
        late = self.late(state)
        if late is None:
            return None
        return _charged({LEDGER: {**spending(state, late), "held": None}})

    def learn_written(self, state: Mapping[str, Any]) -> None:
        """Do nothing: `known` has learned it, and what it returns is not written yet."""

    def nothing_used(self, state: Mapping[str, Any]) -> None:
        """Note that the step's call was refused, and so is not charged any more."""
        self._late.keep(state, {})

    async def charge_answer(
        self, form: Form, state: Mapping[str, Any], runtime: Any, limits: ResolvedLimits
    ) -> Update:
        """Charge the newest answer, whose call nobody saw; what is to be written."""
        *prompt, answer = state["messages"]
        if not isinstance(answer, AIMessage):
            return {}

        async def collect() -> None:
            collect_answer(prompt, answer)

        _, update = await self.run_node(form, state, runtime, limits, collect, has_node=False)
        return update

    def write_with_node(self, update: Update) -> None:
        """Have the node write what a `call_model` in it writes: only a node can write."""
        step = self._running()
        if step is not None:
            step.written = joined(step.written, update)

    def _show(self, paid: Paid, answer: AcquireResult | None) -> None:
        """Make visible what a call was charged; not of a refused call, which was not made."""
        if paid.used:
            super()._show(paid, answer)

    def _running(self) -> _Step | None:
        """The node that runs, if it is charged for all model runs in it."""
        step = _step.get()
        own = step is not None and step.budgets is self and step.task == _task()
        return step if own else None

    def _is_charged_by_its_node(self, request: ModelRequest[Any]) -> bool:
        """Whether `call_model` is called in a node that is charged for all model runs in it."""
        step = self._running()
        if step is None:
            return False
        held, before = ledger(_state(request)).get("held"), ledger(step.state).get("held")
        if held is not None:
            if step.called and before is not None and before != held:
                step.held.append(before)
            step.state[LEDGER] = merge_ledgers(ledger(step.state), Ledger(held=held))
        step.called = True
        return True

    @contextmanager
    def _step(self, state: Mapping[str, Any], *, has_node: bool) -> Iterator[_Step]:
        """While the block runs, the node is charged for its model runs."""
        step = _Step(self, _task(), {**state}, has_node)
        token = _step.set(step)
        try:
            yield step
        finally:
            _step.reset(token)

    def _check(self, step: _Step) -> None:
        """Check that what had to be known before a call was known."""
        if step.called or not step.runs:
            return
        if self.bounds_calls and step.has_node:
            raise RuntimeError(
                "a limit's reserve is a function of the request, and the model's node calls the "
                "model itself, so no request is known: call it with quota.call_model(model, "
                "state, tools), or give reserve as a number"
            )
        if self._needed_prices is not None:
            for run in step.runs:
                cost(run.usage, self._needed_prices)


def _state(request: ModelRequest[Any]) -> Mapping[str, Any]:
    return request.state


def _task() -> str:
    """The task that runs."""
    return str((running_config().get("configurable") or {}).get("checkpoint_ns") or "")


def _without_model(state: Mapping[str, Any], runtime: Any) -> ModelRequest[Any]:
    """A request that names no model: another caller calls it, and is charged for that."""
    known: Any = {"model": None, "messages": [], "state": state, "runtime": runtime}
    return ModelRequest(**known)


def _charged(update: Update, written: Update | None = None) -> Update:
    """The update that charges a call, and says so."""
    return joined(written or {}, {LEDGER: {**update[LEDGER], "uncharged": False}})


def joined(first: Update, second: Update) -> Update:
    """One update that does what two do, one after the other."""
    update = {**first, **second}
    if "messages" in first and "messages" in second:
        update["messages"] = [*first["messages"], *second["messages"]]
    if LEDGER in first and LEDGER in second:
        update[LEDGER] = merge_ledgers(first[LEDGER], second[LEDGER])
    return update

"""The limits of a middleware, as they are at one moment."""

from collections.abc import Sequence
from typing import Any

from langchain_quota.decision import Kind
from langchain_quota.features.root_run.subject import root_subject
from langchain_quota.limits import Limit, counts_calls, is_dynamic
from langchain_quota.middleware._context import aresolve, store_prefix
from langchain_quota.middleware._form import Form
from langchain_quota.middleware._store import StoreClient
from langchain_quota.resolved import ResolvedLimit, ResolvedLimits
from langchain_quota.state import ledger
from langchain_quota.telemetry.recorder import Recorder


class CurrentLimits:
    """Gives the numbers of limits for a state, a runtime and a time."""

    def __init__(
        self,
        limits: Sequence[Limit],
        store: StoreClient | None,
        recorder: Recorder,
        *,
        counts_root_runs: bool,
    ) -> None:
        # Caps on calls at once are handled elsewhere.
        limits = [*filter(counts_calls, limits)]
        self.of_kind: dict[Kind | None, list[Limit]] = {
            "model": [limit for limit in limits if limit.kind == "model"],
            "tool": [limit for limit in limits if limit.kind == "tool"],
            None: [*limits],
        }
        self._has_store = store is not None
        self._prefix = None if store is None else store.prefix
        self._numbers_root_runs = store if counts_root_runs else None
        self._recorder = recorder
        # The limits that are always the same.
        self._fixed: dict[Kind | None, ResolvedLimits] = {}
        if store is None and not any(map(is_dynamic, limits)):
            self._fixed = {
                kind: ResolvedLimits(map(ResolvedLimit.of, each))
                for kind, each in self.of_kind.items()
            }

    async def at(
        self, form: Form, now: float, kind: Kind | None, state: Any, runtime: Any
    ) -> ResolvedLimits:
        """The limits at a moment."""
        if self._fixed:
            return self._fixed[kind].raised(ledger(state).get("granted") or {})
        prefix, store = store_prefix(self._prefix, state, runtime), self._numbers_root_runs
        found = await aresolve(
            self.of_kind[kind],
            state,
            runtime,
            self._recorder,
            form=form,
            now=now if self._has_store else None,
            root_run=await root_subject(form, state, runtime, store, prefix, self._recorder),
            prefix=prefix,
        )
        # People may have granted more in the thread's state.
        return ResolvedLimits(found).raised(ledger(state).get("granted") or {})

"""Count calls for quotas per root run, whose subject is the root run's thread and a number.

The store numbers the root runs of a thread, so that another process can find a run that it resumes.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from langchain.agents.middleware.types import ToolCallRequest

from langchain_quota.limits import Limit
from langchain_quota.limits.call import ROOT_RUN
from langchain_quota.middleware.calls import Change, Step
from langchain_quota.middleware.context import CallContext
from langchain_quota.middleware.feature import Feature, StepCheck, ToolAnswer, ToolHandler
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.root_run import (
    StoreSequence,
    name_in_tool,
    root_run,
    thread_of,
    used_by,
    watch_root_runs,
)
from langchain_quota.middleware.state import FeatureData, State, feature_ledger
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.runtime.sync_async import Mode
from langchain_quota.telemetry.logs import logger


class RootRuns(Feature):
    """Counts calls per root run."""

    name = "root_runs"
    unused: ClassVar[Mapping[str, object]] = {"root_run": None, "root_used": {}}
    """The subject of the root run, and the store's counts of it when this agent last called the
    store, by key."""
    store: StoreClient
    """Quotas need one."""

    @classmethod
    def create(cls, kernel: Kernel) -> "RootRuns | None":
        """Return the feature if a quota is per root run."""
        if not cls.needed_hooks(kernel.limits):
            return None
        watch_root_runs()
        feature = cls(kernel)
        kernel.resolver.root_run_subject = feature._subject
        return feature

    @classmethod
    def needed_hooks(cls, limits: Sequence[Limit]) -> Collection[str]:
        """Return the hook around tools, which passes a root run on, if a quota is per root run."""
        per = [quota.per for limit in limits for quota in limit.quotas]
        return ("wrap_tool_call",) if ROOT_RUN in per else ()

    def begin_run(self, state: State, feature_data: FeatureData) -> None:
        """Forget the root run of the last run."""
        if feature_ledger(state, self.name):
            feature_data[self.name] = {**self.unused}

    async def _subject(self, mode: Mode, state: State, caller: CallContext, prefix: str) -> str:
        """Return the subject under which a store counts the calls of the running node."""
        run, entries = root_run(), feature_ledger(state, self.name)
        subject: str | None = entries.get("root_run")
        if run is None:
            return subject or caller.run()
        if subject is not None:
            if run.subject is None:
                # The run was resumed: restore its subject, and what it has used.
                run.learn_used(entries.get("root_used") or {})
                run.subject = subject
            return subject
        if run.subject is not None:
            return run.subject
        is_needed = self._kernel.on_store_error == "block"
        sequence = StoreSequence(self.store, prefix, is_needed=is_needed)
        name = await sequence.numbered(mode, run, caller)
        if name is None and thread_of(run, caller) is not None:
            # The store is unavailable. The next call tries to get a number again.
            return run.key
        run.subject = name or run.key
        if run.is_lost:
            # The root run around this one may have a budget for these calls.
            self.recorder.count_error("root_run", "inside")
            self.recorder.log_first(_log_lost)
        return run.subject

    async def prepare(self, mode: Mode, step: Step) -> Step:  # noqa: ARG002 - as for every feature
        """Add what the root run has used to the counts of the step."""
        run = root_run()
        return step if run is None else step.using(used_by(run, step.places))

    async def admit(self, mode: Mode, step: Step, admit: StepCheck) -> Step:
        """Learn what the store has counted of the root run."""
        step = await admit(mode, step)
        # Reservations are not counted yet: the use is learned when they are settled.
        run, used = root_run(), step.result.used
        if run is not None and run.subject is not None and step.answered:
            charged = step.result.charged(step.demands)
            run.learn_used(
                {
                    step.places[meter.counter].key: used[meter.counter] + charged[meter.counter]
                    for plan in step.plans
                    for rule in plan.rules
                    for meter in rule.meters
                    if meter.per == ROOT_RUN and meter.lease is None
                }
            )
        return step

    def conclude(self, step: Step, change: Change) -> Change:
        """Save what a resumed run needs to continue with the same counts."""
        run, saved = root_run(), feature_ledger(step.state, self.name)
        if run is None:
            return change
        values: dict[str, object] = {}
        if run.subject != saved.get("root_run"):
            values["root_run"] = run.subject
        if run.used != (saved.get("root_used") or {}):
            values["root_used"] = {**run.used}
        return change.saving(self.name, values)

    async def around_tool(
        self,
        mode: Mode,  # noqa: ARG002 - as for every feature
        request: ToolCallRequest,
        call: ToolHandler,
    ) -> ToolAnswer:
        """Pass the name of the root run on to what the tool starts."""
        name_in_tool(request)
        return await call(request)


def _log_lost() -> None:
    """Log that a run begins a root run of its own: no error, since it may be meant so."""
    logger.warning(
        "a run with a quota per 'root_run' started inside another run but cannot find it, so it "
        "has a separate budget. Pass on the other run's context, or the callbacks of its config. "
        "Create middlewares when the program starts: the other run may have started before the "
        "first one with such a quota"
    )

"""What telemetry shows of runs, if it is asked to: unchecked calls, and histograms of use.

Unchecked calls are those that no limit checks, in root runs in which limits check other calls. The
handler of the root run sees every call that starts, and middlewares report to it which calls they
check. When the root run ends, the difference is recorded, by agent and kind of call.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partialmethod
from uuid import UUID

from langchain_core.messages import AIMessage, AnyMessage
from langgraph.errors import GraphInterrupt

from langchain_quota.core.plans import run_counter
from langchain_quota.limits.call import Kind
from langchain_quota.limits.options import has_number
from langchain_quota.middleware.calls import Change, Step, model_context
from langchain_quota.middleware.context import running_agent, running_config
from langchain_quota.middleware.feature import Feature
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.root_run import DECISION, RootRun, root_run, watch_root_runs
from langchain_quota.middleware.state import FeatureData, State
from langchain_quota.runtime import compat
from langchain_quota.telemetry import names
from langchain_quota.telemetry.logs import agent_name, logger
from langchain_quota.telemetry.recorder import Recorder

MOST_CALLS = 10_000
"""How many calls of a root run are compared: each takes memory until the run ends. A longer run is
not counted."""

_CallGroup = tuple[str, str | None, Kind]
"""The namespace of a graph, the name of its agent, and the kind of the calls."""


class CountingRootRun(RootRun):
    """A root run that sees each model and tool that starts."""

    # Threads that run tools in parallel change it, each by single operations.
    ignore_llm = ignore_chat_model = ignore_agent = ignore_chain = False

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self._outermost: UUID | None = None
        self._waits = False
        self.running: dict[UUID, _CallGroup] = {}
        self.returned: list[_CallGroup] = []
        # By message: stacked middlewares check the same one.
        self._checked: dict[tuple[str, str | None, str | int], tuple[int, int]] = {}

    def note_checked(
        self, graph: str, agent: str | None, messages: Sequence[AnyMessage], models: int
    ) -> None:
        """Note that a middleware checks the newest answer of a model, with its tool calls."""
        for number, message in enumerate(reversed(messages)):
            if isinstance(message, AIMessage) and len(self._checked) < MOST_CALLS:
                name = message.id or len(messages) - number
                self._checked.setdefault((graph, agent, name), (models, len(message.tool_calls)))
                return

    def on_chain_start(
        self,
        serialized: Mapping[str, object] | None,
        inputs: object,
        *,
        run_id: UUID,
        metadata: compat.Metadata = None,
        **details: object,
    ) -> None:
        """Learn how the root run begins, and see a call of a decision model: it is a chain."""
        if self._outermost is None:
            self._outermost = run_id
        if not self.key:
            super().on_chain_start(serialized, inputs, run_id=run_id, metadata=metadata)
            if isinstance(self.joined, CountingRootRun):
                # Count the calls for the root run that this one belongs to.
                self.running, self.returned = self.joined.running, self.joined.returned
        if details.get("run_type") == DECISION:
            self._start("model", run_id=run_id, metadata=metadata)

    def on_chain_end(self, *_: object, run_id: UUID, **__: object) -> None:
        """Record how many calls were not checked, if the root run is over."""
        self._end(run_id=run_id)
        # The calls of a run that waits for a person may be checked when it is resumed. A resumed
        # run no longer knows what was checked before.
        is_complete = len(self.returned) < MOST_CALLS and not self.resumes and not self._waits
        if run_id != self._outermost or self.recorder is None or not is_complete:
            return
        checked = Counter[_CallGroup]()
        for (graph, agent, _name), (models, tools) in self._checked.items():
            checked[graph, agent, "model"] += models
            checked[graph, agent, "tool"] += tools
        for (graph, agent, kind), count in Counter(self.returned).items():
            # Before 1.2, LangGraph does not give the hooks of a node that is an agent its name.
            unchecked = count - (checked[graph, agent, kind] or checked[graph, None, kind])
            if unchecked > 0:
                self.recorder.count(names.UNCHECKED_CALLS, agent, kind, amount=unchecked)
                # A `QuotaWarning` that is an error would be lost: LangChain swallows it here.
                remedy = _ORDER if kind == "tool" and checked[graph, agent, "model"] else _ATTACH
                self.recorder.log_first(_log, agent_name(agent), kind, remedy)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: object) -> None:
        """See a run that waits for a person."""
        self._fail(run_id=run_id)
        self._waits |= isinstance(error, GraphInterrupt)

    def _start(
        self, kind: Kind, *_: object, run_id: UUID, metadata: compat.Metadata = None, **__: object
    ) -> None:
        graph = "|".join(compat.enclosing_tasks(compat.task_namespace(metadata)))
        self.running[run_id] = graph, compat.agent_name(metadata), kind

    def _end(self, *_: object, run_id: UUID, **__: object) -> None:
        group = self.running.pop(run_id, None)
        if group is not None and len(self.returned) < MOST_CALLS:
            self.returned.append(group)

    def _fail(self, *_: object, run_id: UUID, **__: object) -> None:
        # Another middleware may make a call that fails once more: only one of both is checked.
        self.running.pop(run_id, None)

    on_llm_start = on_chat_model_start = partialmethod(_start, "model")
    on_tool_start = partialmethod(_start, "tool")
    on_llm_end = on_tool_end = _end
    on_llm_error = on_tool_error = _fail


class Unchecked(Feature):
    """Notes which calls are checked."""

    @classmethod
    def create(cls, kernel: Kernel) -> "Unchecked | None":
        """Return the feature if the telemetry counts unchecked calls."""
        feature = cls(kernel)
        if not feature.recorder.counts_unchecked_calls:
            return None
        watch_root_runs(CountingRootRun)
        return feature

    def after_model(self, state: State, *, saved: bool) -> None:  # noqa: ARG002 - not of interest
        """Note that the running agent's newest model call is checked, and its tool calls."""
        self._note(state.get("messages") or (), models=1)

    def conclude(self, step: Step, change: Change) -> Change:
        """Note tool calls that are checked, though the model call that asks for them is not."""
        if step.pending is not None:
            self._note([step.pending.message], models=0)
        return change

    def _note(self, messages: Sequence[AnyMessage], *, models: int) -> None:
        run = root_run()
        if isinstance(run, CountingRootRun):
            run.recorder = run.recorder or self.recorder
            task = running_config().get("configurable", {}).get("checkpoint_ns") or ""
            graph = "|".join(compat.enclosing_tasks(task))
            run.note_checked(graph, running_agent(), messages, models)


_ATTACH = (
    "give the agent that makes it a QuotaMiddleware with the same store (deepagents: "
    "with_limits(create_deep_agent, quota); a supervisor: GraphQuota(…).model(…))"
)
_ORDER = "list QuotaMiddleware after a middleware whose after_model jumps to 'tools'"


def _log(agent: str, kind: str, remedy: str) -> None:
    logger.warning(
        "no limit checked a %s call of agent %r, although its run has limits: %s",
        kind,
        agent,
        f"{remedy}. Others of this kind are only counted, in langchain_quota_unchecked_calls_total",
    )


class RunHistograms(Feature):
    """Observes what the limits have counted in a run, once, when it ends."""

    @classmethod
    def create(cls, kernel: Kernel) -> "RunHistograms | None":
        """Return the feature if the telemetry has histograms of runs."""
        return cls(kernel) if kernel.recorder.has_run_histograms else None

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        # A RepeatLimit counts nothing that adds up, and a ConcurrencyLimit has no number for a run.
        self._limits = [limit for limit in kernel.limits if limit.counted and has_number(limit)]

    def begin_run(self, state: State, feature_data: FeatureData) -> None:  # noqa: ARG002 - as for every feature
        """Create the series at 0, because `increase()` does not see the first value of a series."""
        unused = [(limit.name, limit.unit, 0) for limit in self._limits]
        self.recorder.record_run(running_agent(), unused, has_ended=False)

    def end_run(self, state: State, runtime: object) -> None:
        """Observe the run, unless its last step runs again."""
        context = model_context(state, runtime)
        if not self.recorder.is_new(context.task(self._kernel.name)):
            return
        counts = self._kernel.state_counts(state, self._limits)
        used = [(limit.name, limit.unit, counts[run_counter(limit)]) for limit in self._limits]
        self.recorder.record_run(context.agent, used)

"""Calls that no limit checks, in root runs in which limits check other calls.

The handler of the root run counts the calls that it sees, and limiters count there those that they
check. When the root run ends, what is seen minus what is checked is recorded, by agent and kind.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partialmethod
from typing import Any
from uuid import UUID

from langchain_core.messages import AIMessage
from langgraph.errors import GraphInterrupt

from langchain_quota.limits.call import Kind
from langchain_quota.middleware.calls import Batch, HookResult
from langchain_quota.middleware.context import running_agent, running_config
from langchain_quota.middleware.feature import Feature
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.root_run import DECISION, RootRun, root_run, watch_root_runs
from langchain_quota.middleware.state import State
from langchain_quota.runtime import compat
from langchain_quota.telemetry import names
from langchain_quota.telemetry.logs import agent_name, logger
from langchain_quota.telemetry.recorder import Recorder

MOST_CALLS = 10_000
"""A root run with more calls is not looked at: something is kept of each until the run ends."""

_Where = tuple[str, str | None, Kind]
"""The namespace of a graph, the name of its agent, and the kind of the call."""


class CountingRootRun(RootRun):
    """A root run that sees each model and tool that starts."""

    # Threads that run tools in parallel change it, each by single operations.
    ignore_llm = ignore_chat_model = ignore_agent = ignore_chain = False

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self._outermost: UUID | None = None
        self._waits = False
        self.running: dict[UUID, _Where] = {}
        self.seen: list[_Where] = []
        # By message: stacked limiters check the same one.
        self._judged: dict[tuple[str, str | None, str | int], tuple[int, int]] = {}

    def judge(self, graph: str, agent: str | None, messages: Sequence[Any], models: int) -> None:
        """Note that a limiter checks the newest answer of a model, with its tool calls."""
        for number, message in enumerate(reversed(messages)):
            if isinstance(message, AIMessage) and len(self._judged) < MOST_CALLS:
                name = message.id or len(messages) - number
                self._judged.setdefault((graph, agent, name), (models, len(message.tool_calls)))
                return

    def on_chain_start(self, *given: Any, **more: Any) -> None:
        """Learn how the root run begins, and see a call of a decision model: it is a chain."""
        if self._outermost is None:
            self._outermost = more["run_id"]
        if not self.key:
            super().on_chain_start(*given, **more)
            if isinstance(self.joined, CountingRootRun):
                # It sees for the root run to which it belongs.
                self.running, self.seen = self.joined.running, self.joined.seen
        if more.get("run_type") == DECISION:
            self._start("model", **more)

    def on_chain_end(self, *_: object, **more: Any) -> None:
        """Record what is seen minus what is checked, if the root run is over."""
        # What a run that waits for a person has not checked yet is checked when it is resumed. Then
        # what it has checked before is not known any more.
        self._end(**more)
        is_known = len(self.seen) < MOST_CALLS and not self.resumes and not self._waits
        if more["run_id"] != self._outermost or self.recorder is None or not is_known:
            return
        judged = Counter[_Where]()
        for (graph, agent, _name), (models, tools) in self._judged.items():
            judged[graph, agent, "model"] += models
            judged[graph, agent, "tool"] += tools
        for (graph, agent, kind), count in Counter(self.seen).items():
            # Before 1.2, LangGraph does not give the hooks of a node that is an agent its name.
            unchecked = count - (judged[graph, agent, kind] or judged[graph, None, kind])
            if unchecked > 0:
                self.recorder.count(names.UNCHECKED_CALLS, agent, kind, amount=unchecked)
                # It causes no `QuotaWarning`: LangChain would swallow one that is an error.
                self.recorder.log_first(_log, agent_name(agent), kind)

    def on_chain_error(self, error: BaseException, **more: Any) -> None:
        """See a run that waits for a person."""
        self._fail(**more)
        self._waits |= isinstance(error, GraphInterrupt)

    def _start(self, kind: Kind, *_: object, **more: Any) -> None:
        metadata: Mapping[str, Any] | None = more.get("metadata")
        graph = compat.graph_namespace(compat.task_namespace(metadata))
        self.running[more["run_id"]] = graph, compat.agent_name(metadata), kind

    def _end(self, *_: object, **more: Any) -> None:
        where = self.running.pop(more["run_id"], None)
        if where is not None and len(self.seen) < MOST_CALLS:
            self.seen.append(where)

    def _fail(self, *_: object, **more: Any) -> None:
        # A call that fails may be made once more by another middleware: only one is checked.
        self.running.pop(more["run_id"], None)

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

    def on_hook_result(self, batch: Batch, conclusion: HookResult) -> HookResult:
        """Note tool calls that are checked without the call of the model that has made them."""
        if batch.pending is not None:
            self._note([batch.pending.message], models=0)
        return conclusion

    def _note(self, messages: Sequence[Any], *, models: int) -> None:
        run = root_run()
        if isinstance(run, CountingRootRun):
            run.recorder = run.recorder or self.recorder
            task = running_config().get("configurable", {}).get("checkpoint_ns") or ""
            run.judge(compat.graph_namespace(task), running_agent(), messages, models)


def _log(agent: str, kind: str) -> None:
    logger.warning(
        "no limit checked a %s call of agent %r, and its run has limits: %s",
        kind,
        agent,
        "give the agent that makes it a QuotaMiddleware with the same store (deepagents: "
        "with_limits(create_deep_agent, quota); a supervisor: GraphQuota(…).model(…)). Others of "
        "this kind are only counted, in langchain_quota_unchecked_calls_total",
    )

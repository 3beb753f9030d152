"""Charge calls again in a store when they run again from an old checkpoint.

A check writes its name to the state. The first step that makes a call of the check claims the call,
in this process. The first step of a resumed run asks the checkpointer whether it finished before.
"""

import asyncio
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from typing import Any

from langchain.agents.middleware.types import ToolCallRequest
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
from langgraph.runtime import ExecutionInfo

from langchain_quota.limits.call import Kind
from langchain_quota.middleware.calls import Change, Step, Update
from langchain_quota.middleware.context import NodeRuntime, digest, running_config, running_runtime
from langchain_quota.middleware.feature import (
    Feature,
    ModelCall,
    Request,
    Response,
    StepCheck,
    ToolAnswer,
    ToolHandler,
)
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.state import (
    LEDGER,
    Counts,
    Ledger,
    State,
    feature_ledger,
    ledger,
    merge_ledgers,
)
from langchain_quota.runtime import compat
from langchain_quota.runtime.sync_async import Mode, call_variant, newest_dicts

_RERUN = "reruns"
"""The key that marks the state with which a call that runs again is checked."""


class Reruns(Feature):
    """Checks calls that run again, in the node where they run."""

    name = "reruns"

    @classmethod
    def create(cls, kernel: Kernel) -> "Reruns | None":
        """Return the feature if a store keeps counts."""
        if kernel.store is None:
            return None
        # A wrapper around each model call costs as much as a third of a check.
        return cls(kernel) if "model" in kernel.kinds else ToolReruns(kernel)

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        # By check: the task that made it. By check and call: the first step that made the call.
        self._claims: Callable[[Hashable], dict[str, str]] = newest_dicts(20_000)
        # By checkpoint: what was read of the step that resumes there, and the tasks that know it.
        self._steps: Callable[[Hashable], dict[str, Any]] = newest_dicts(1_000)

    async def prepare(self, mode: Mode, step: Step) -> Step:  # noqa: ARG002 - as for every feature
        """Let a refusal of a call that runs again block it only: nobody is asked, no run ends."""
        return step._replace(stops={}) if _RERUN in step.state else step

    async def admit(self, mode: Mode, step: Step, admit: StepCheck) -> Step:
        """Rename the running task if it was finished before, and its calls cannot be claimed."""
        info, context = getattr(step.runtime, "execution_info", None), step.context
        is_claimed = info is not None and bool(self._claims(info.task_id))
        if (
            info is not None
            and not step.is_second
            and (self._kernel.checks_inline or not is_claimed)
        ):
            attempt, _ = await self._find_earlier_run(mode, info)
            if attempt:
                name = f"{context.task_id}/{attempt}"
                step = step._replace(context=context._replace(task_id=name))
        return await admit(mode, step)

    def conclude(self, step: Step, change: Change) -> Change:
        """Name the check in the state."""
        kind: Kind = "model" if step.pending is None else "tool"
        if step.sent is not None and step.context.task_id is not None:
            check = digest(step.sent.idempotency_key)[:16]
            for name in (check, step.context.task_id):
                self._claims(name).setdefault("by", step.context.task_id)
            return change.saving(self.name, {kind: check})
        if feature_ledger(step.state, self.name).get(kind):
            # No store has checked these calls, which may have the ids of calls that it did check.
            return change.saving(self.name, {kind: ""})
        return change

    async def around_model(
        self, mode: Mode, request: Request, call: ModelCall, written: Update
    ) -> Response | None:
        """Check a model call that runs again; add the update that ends a blocked run."""
        runtime = await self._rerun_runtime(mode, "model", request.state)
        if runtime is None:
            return await call(request)
        state = {**request.state, _RERUN: True}
        update = await self._kernel.check_model_call(mode, state, runtime) or {}
        if update.pop("jump_to", None):
            written.update(update)
            return None
        # The old check charged another window or user, and knows other numbers. The state's counts
        # have this call by now.
        checked = Ledger(**{**ledger(update), "counts": Counts()})
        state = {**request.state, LEDGER: merge_ledgers(ledger(request.state), checked)}
        response = await call(compat.with_state(request, state))
        written[LEDGER] = merge_ledgers(checked, ledger(written))
        return response

    async def around_tool(
        self, mode: Mode, request: ToolCallRequest, call: ToolHandler
    ) -> ToolAnswer:
        """Check a tool call that runs again."""
        tool_call, state = request.tool_call, request.state
        runtime = await self._rerun_runtime(mode, "tool", state, tool_call["id"])
        if runtime is not None:
            info: Any = runtime.execution_info
            message = AIMessage("", id=info.task_id, tool_calls=[tool_call])
            entries = merge_ledgers(ledger(state), Ledger(final=""))
            alone = {
                "messages": [message],
                "structured_response": None,
                LEDGER: entries,
                _RERUN: True,
            }
            update = await self._kernel.check_tool_calls(
                mode, {**state, **alone}, runtime, task=f"{self._kernel.name}/{tool_call['id']}"
            )
            update = update or {}
            for answer in update.get("messages", ()):
                if isinstance(answer, ToolMessage):
                    return answer
            # As around a model call: if this call gets no slot, its own charge is refunded.
            charged = merge_ledgers(ledger(state), ledger(update))
            request = request.override(state={**state, LEDGER: charged})
        return await call(request)

    async def _find_earlier_run(self, mode: Mode, info: ExecutionInfo) -> tuple[str, bool]:
        """Look for an earlier run of the running task.

        Return a name for this attempt if the task itself was finished before, or else an empty one;
        and whether the task, or its step at a copied checkpoint, was finished before.
        """
        config = running_config()
        configurable = config.get("configurable") or {}
        saver = compat.checkpointer(configurable)
        if not (compat.is_resumed_step(configurable) and isinstance(saver, BaseCheckpointSaver)):
            return "", False
        # One task of a step reads for all. A task that asks again runs again.
        own, steps = ({info.task_id}, Future[Any]()), self._steps(info.checkpoint_id)
        tasks, read = steps.setdefault("read", own)
        if read is not own[1] and info.task_id in tasks:
            tasks, read = steps["read"] = own
        tasks.add(info.task_id)
        result = None
        if read is not own[1]:
            result = await asyncio.shield(asyncio.wrap_future(read)) if mode else read.result()
        try:
            result = result or await _finished_tasks(mode, saver, config, info.checkpoint_id)
        finally:
            # If it fails, the others read for themselves.
            own[1].set_result(result)
        is_own = info.task_id.partition("/")[0] in result[0]
        return str(info.node_first_attempt_time) * is_own, is_own or result[1]

    async def _rerun_runtime(
        self, mode: Mode, kind: Kind, state: State, call_id: str | None = None
    ) -> NodeRuntime | None:
        """Return the runtime in which to check a call that runs again; `None` for a new call."""
        info = getattr(running_runtime(), "execution_info", None)
        if info is None or not isinstance(state, Mapping):
            return None
        check = feature_ledger(state, self.name).get(kind, "")
        attempt, runs_again = await self._find_earlier_run(mode, info)
        checked_by = self._claims(check).get("by", "")
        if checked_by.partition("/")[0] == info.task_id and checked_by.endswith(attempt):
            return None
        # Two calls under one id are two tasks of one step.
        step = f"{info.checkpoint_id}/{attempt}"
        if check:
            runs_again |= self._claims((check, call_id)).setdefault("by", step) != step
        return running_runtime(f"again/{attempt}") if runs_again else None


class ToolReruns(Reruns):
    """Checks tool calls that run again: no limit is on models, or they are checked around them."""

    around_model = Feature.around_model


async def _finished_tasks(
    mode: Mode, saver: BaseCheckpointSaver[Any], config: RunnableConfig, checkpoint_id: str
) -> tuple[set[str], bool]:
    """Return the tasks of a step that finished before, and whether its original has finished."""
    checkpoint, is_copied = await _checkpoint_of_step(mode, saver, config, checkpoint_id)
    finished = compat.finished_tasks(checkpoint) if checkpoint and not is_copied else set()
    while checkpoint:
        if is_copied and compat.finished_tasks(checkpoint):
            return finished, True
        if checkpoint.metadata.get("source") not in {"fork", "update"}:
            return finished, False
        # Look at the checkpoint that this one was copied from.
        is_copied, parent = True, checkpoint.parent_config
        if parent is None:
            break
        checkpoint = await call_variant(mode, saver.get_tuple, saver.aget_tuple, parent)
    # The original checkpoint is gone: assume that its step has finished.
    return finished, True


async def _checkpoint_of_step(
    mode: Mode, saver: BaseCheckpointSaver[Any], config: RunnableConfig, checkpoint_id: str
) -> tuple[CheckpointTuple | None, bool]:
    """Return the checkpoint at which a step runs, and whether the step runs at a copy of it."""
    configurable = config["configurable"]
    graphs = compat.checkpoint_ids(configurable)
    namespace = next((graph for graph in graphs if graphs[graph] == checkpoint_id), "")
    thread = {"thread_id": configurable.get("thread_id"), "checkpoint_ns": namespace}
    # The step runs at a copy of the checkpoint that a caller names. The copy may not be saved yet.
    named_id = config["metadata"].get("checkpoint_id")
    for saved_id, is_copied in ((checkpoint_id, False), (named_id, True)):
        saved: RunnableConfig = {"configurable": {**thread, "checkpoint_id": saved_id}}
        checkpoint = await call_variant(mode, saver.get_tuple, saver.aget_tuple, saved)
        if checkpoint is not None:
            return checkpoint, is_copied
    return None, True

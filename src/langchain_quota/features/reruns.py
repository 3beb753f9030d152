"""Calls that run again from an old checkpoint: a store charges them again.

A check writes its name to the state, and the first step that makes a call of the check claims it,
in this process. A step that a run goes on with asks the checkpointer whether it was finished.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from langchain.agents.middleware.types import ToolCallRequest
from langchain_core.messages import AIMessage, ToolMessage
from langgraph.checkpoint.base import WRITES_IDX_MAP

from langchain_quota.middleware.calls import Batch, HookResult, Update
from langchain_quota.middleware.context import digest, running_config, running_runtime
from langchain_quota.middleware.feature import Feature, Request, ToolAnswer, ToolHandler
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.state import (
    LEDGER,
    Ledger,
    State,
    feature_ledger,
    ledger,
    merge_ledgers,
)
from langchain_quota.runtime import compat
from langchain_quota.runtime.sync_async import Mode, call_variant

_RERUN = "reruns"  # in the state with which a call is checked that runs again


class Reruns(Feature):
    """Checks calls that run again where they run."""

    name = "reruns"

    @classmethod
    def create(cls, kernel: Kernel) -> "Reruns | None":
        """Return the feature if a store keeps counts."""
        return None if kernel.store is None else cls(kernel)

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        # By check: the task that made it. By check and call: the step that made the call first.
        self._claims: Callable[[Hashable], dict[str, str]] = lru_cache(20_000)(lambda _: {})

    async def name_attempt(self, mode: Mode, runtime: Any) -> Any:
        """Name the running task anew if it was finished before, and its calls cannot be claimed."""
        info: Any = getattr(runtime, "execution_info", None)
        has_own_node = not self._kernel.checks_inline
        if info is None or (has_own_node and self._claims(info.task_id)):
            return runtime
        attempt, _ = await _earlier(mode, info)
        task = f"{info.task_id}/{attempt}"
        return runtime.override(execution_info=replace(info, task_id=task)) if attempt else runtime

    def adjust_checks(self, batch: Batch) -> None:
        """Have a call that runs again refused where it runs: nobody is asked, and no run ends."""
        if _RERUN in batch.state:
            batch.stops = {}

    def on_hook_result(self, batch: Batch, conclusion: HookResult) -> HookResult:
        """Name the check in the state."""
        if batch.sent is not None and batch.context.task_id is not None:
            check = digest(batch.sent.idempotency_key)[:16]
            for name in (check, batch.context.task_id):
                self._claims(name).setdefault("by", batch.context.task_id)
            batch.save(self.name, {batch.calls[0].kind: check})
        return conclusion

    async def check_rerun(self, mode: Mode, request: Request) -> Update | None:
        """Check a model call that runs again; what ends the run, or `None` if the call may run."""
        runtime = await self._runs_again(mode, "model", request.state)
        state = {**request.state, _RERUN: True}
        update = runtime and await self._kernel.check_model_call(mode, state, runtime)
        return update if update and update.pop("jump_to", None) else None

    async def around_tool(
        self, mode: Mode, request: ToolCallRequest, call: ToolHandler
    ) -> ToolAnswer:
        """Check a tool call that runs again."""
        tool_call, state = request.tool_call, request.state
        runtime = await self._runs_again(mode, "tool", state, tool_call["id"])
        if runtime is not None:
            message = AIMessage("", id=runtime.execution_info.task_id, tool_calls=[tool_call])
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
            for answer in (update or {}).get("messages", ()):
                if isinstance(answer, ToolMessage):
                    return answer
        return await call(request)

    async def _runs_again(self, mode: Mode, kind: str, state: State, call: Any = None) -> Any:
        """Return the runtime in which a call is checked that runs again, or else `None`."""
        info = getattr(running_runtime(), "execution_info", None)
        if info is None or not isinstance(state, Mapping):
            return None
        check = feature_ledger(state, self.name).get(kind, "")
        attempt, again = await _earlier(mode, info)
        checked_by = self._claims(check).get("by", "")
        if checked_by.partition("/")[0] == info.task_id and checked_by.endswith(attempt):
            return None
        # Two calls under one id are two tasks of one step.
        step = f"{info.checkpoint_id}/{attempt}"
        again |= check != "" and self._claims((check, call)).setdefault("by", step) != step
        return running_runtime(f"again/{attempt}") if again else None


async def _earlier(mode: Mode, info: Any) -> tuple[str, bool]:
    """Return a name for this attempt if its task was finished before, and whether its step was."""
    config = running_config()
    configurable = config.get("configurable") or {}
    saver, graphs = compat.checkpointer(configurable), compat.checkpoint_ids(configurable)
    if not compat.is_resumed_step(configurable) or not hasattr(saver, "get_tuple"):
        return "", False
    # The step runs at a copy of the checkpoint that a caller names. The copy may not be saved yet.
    checkpoint, is_copy, ids = (
        None,
        False,
        [info.checkpoint_id, config["metadata"].get("checkpoint_id")],
    )
    around = next((graph for graph in graphs if graphs[graph] == info.checkpoint_id), "")
    at = {"thread_id": configurable.get("thread_id"), "checkpoint_ns": around}
    while checkpoint is None and ids:
        of: Any = {"configurable": {**at, "checkpoint_id": ids.pop(0)}}
        checkpoint = await call_variant(mode, saver.get_tuple, saver.aget_tuple, of)
        is_copy = not ids
    while checkpoint:
        writes = checkpoint.pending_writes or ()
        done = {task for task, channel, _ in writes if channel not in WRITES_IDX_MAP}
        if done if is_copy else info.task_id.partition("/")[0] in done:
            return "" if is_copy else str(info.node_first_attempt_time), True
        if checkpoint.metadata.get("source") not in {"fork", "update"}:
            return "", False
        is_copy, of = True, checkpoint.parent_config
        checkpoint = of and await call_variant(mode, saver.get_tuple, saver.aget_tuple, of)
    return "", True

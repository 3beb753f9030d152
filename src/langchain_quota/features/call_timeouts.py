"""Time limits of single tool calls: when the time is over, an error answers the call."""

import asyncio
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from threading import Thread

from langchain.agents.middleware.types import ToolCallRequest

from langchain_quota.core.stops import make_reason
from langchain_quota.limits import Limit
from langchain_quota.limits.budgets import TimeLimit
from langchain_quota.middleware.context import running_agent
from langchain_quota.middleware.feature import Feature, ToolAnswer, ToolHandler
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.history import answer
from langchain_quota.runtime import compat
from langchain_quota.runtime.sync_async import Mode, run_sync
from langchain_quota.runtime.units import as_time
from langchain_quota.telemetry import names


class CallTimes(Feature):
    """Ends tool calls that take too long."""

    @classmethod
    def create(cls, kernel: Kernel) -> "CallTimes | None":
        """Return the feature if a limit has a `call_limit`."""
        return cls(kernel) if _by_time(kernel.limits) else None

    @classmethod
    def needed_hooks(cls, limits: Sequence[Limit]) -> Collection[str]:
        """Return the hook around tools if a limit has a `call_limit`."""
        return ("wrap_tool_call",) if _by_time(limits) else ()

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        limits = _by_time(kernel.limits)
        self._dry_run_limits = [limit for limit in limits if not limit[1].enforce]
        # The shortest one that is enforced ends every call.
        self._enforced = next((limit for limit in limits if limit[1].enforce), None)

    async def around_tool(
        self, mode: Mode, request: ToolCallRequest, call: ToolHandler
    ) -> ToolAnswer:
        """Make a tool call; if it takes too long, answer it."""
        started_at = time.monotonic()
        try:
            if self._enforced is None:
                return await call(request)
            return await self._ended(mode, request, call, *self._enforced)
        finally:
            took = (time.monotonic() - started_at) * 1000
            for milliseconds, limit in self._dry_run_limits:
                if took > milliseconds:
                    self._count(limit, "dry_run")

    async def _ended(
        self,
        mode: Mode,
        request: ToolCallRequest,
        call: ToolHandler,
        milliseconds: int,
        limit: TimeLimit,
    ) -> ToolAnswer:
        """Return the answer to a call, or an error if the call takes too long."""
        runs_on = not mode or compat.runs_in_thread(request.tool)
        if mode:
            # Not `wait_for`: the call stays in the task of the run, which may be cancelled itself.
            try:
                async with asyncio.timeout(milliseconds / 1000) as timer:
                    return await call(request)
            except TimeoutError:
                if not timer.expired():
                    # The tool's own.
                    raise
        else:
            done: Future[ToolAnswer] = Future()
            context = copy_context()

            async def answered() -> ToolAnswer:
                return await call(request)

            def run() -> None:
                try:
                    done.set_result(context.run(lambda: run_sync(answered())))
                except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                    done.set_exception(error)

            # A daemon, so that a tool which never ends does not keep the process from ending.
            Thread(target=run, name="langchain-quota tool call", daemon=True).start()
            try:
                return done.result(milliseconds / 1000)
            except TimeoutError:
                if done.done():
                    return done.result()
        outcome = "left_running" if runs_on else "cancelled"
        self._count(limit, outcome)
        tool_call = request.tool_call
        what = "and is no longer waited for. It may still run" if runs_on else "and was stopped"
        text = (
            f"The call of '{tool_call['name']}' took longer than {as_time(milliseconds)}, {what}. "
            "It may have done its work, or a part of it. Look at what it did, try a smaller step, "
            "or go on without it."
        )
        reason = make_reason(
            outcome, limit.name, "call", threshold=milliseconds, unit="milliseconds"
        )
        return answer(str(tool_call["id"]), tool_call["name"], text, reason)

    def _count(self, limit: TimeLimit, outcome: str) -> None:
        self.recorder.count(names.LONG_CALLS, running_agent(), limit.name, outcome)


def _by_time(limits: Sequence[Limit]) -> list[tuple[int, TimeLimit]]:
    """Return the limits on the time of a call, the shortest first, in milliseconds."""
    timed = [
        (limit.call_milliseconds, limit)
        for limit in limits
        if isinstance(limit, TimeLimit) and limit.call_milliseconds is not None
    ]
    return sorted(timed, key=lambda pair: pair[0])

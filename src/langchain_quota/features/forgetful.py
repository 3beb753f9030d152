"""Warns of thread limits whose counts do not outlive the run."""

from typing import Any

from langchain_quota.middleware.context import CallContext, call_context, running_runtime
from langchain_quota.middleware.feature import Feature
from langchain_quota.state import Own


class Forgetful(Feature):
    """Warns once, when a run begins."""

    @classmethod
    def of(cls, limiter: Any) -> "Forgetful | None":
        """The feature, if there is a thread limit."""
        limited = any(limit.thread_limit is not None for limit in limiter.limits)
        return cls(limiter) if limited else None

    def __init__(self, limiter: Any) -> None:
        self._limiter = limiter
        self._warned = False

    def begin(self, state: Any, own: Own) -> None:  # noqa: ARG002 - not of interest
        """Warn if neither a checkpointer nor a store keeps the counts of threads."""
        limiter, context = self._limiter, call_context(running_runtime(), model_name=None)
        has_store = limiter._store is not None  # noqa: SLF001 - the kernel gives it
        if self._warned or context.remembers or (has_store and context.run_thread_id is not None):
            return
        self._warned = True
        remedy = _remedy(context, has_store=has_store, takes_store=limiter.takes_store)
        limiter._made_at.warn(  # noqa: SLF001 - the same
            f"{limiter.name} has a thread limit, but this agent's state does not outlive the run: "
            f"the limit holds within one run only. {remedy}"
        )


def _remedy(context: CallContext, *, has_store: bool, takes_store: bool) -> str:
    """What to do where the counts of threads do not outlive the run."""
    thread_id = '{"configurable": {"thread_id": …}}'
    if not context.is_nested:
        if has_store:
            return f"Call the agent with {thread_id}: the store counts by it"
        return "Give create_agent a checkpointer, or use run_limit"
    root_run = 'limit the outermost run: Quota(…, per="root_run")'
    if has_store:
        return f"Call the outermost graph with {thread_id}: the store counts by it. Or {root_run}"
    user = "give the middleware" if takes_store else "use QuotaMiddleware with"
    return (
        f"To count all agents of a thread together, {user} store=MemoryStore() or RedisStore(), "
        f"and call the outermost graph with {thread_id}; or, with a store, {root_run}. To count "
        "this agent alone, give create_agent checkpointer=True, and the outermost graph a "
        "checkpointer"
    )

"""Warnings of likely mistakes: thread limits that are not saved, and misspelt tools."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from langchain_quota.middleware.context import call_context, running_runtime
from langchain_quota.middleware.feature import Feature, Tool
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.state import FeatureData, State
from langchain_quota.telemetry.logs import agent_name, logger

_ALIKE = 0.8
"""How alike two names must be, by `difflib`."""


class UnsavedThreadLimits(Feature):
    """Warns once, when a run begins, of thread limits whose counts do not outlive the run."""

    @classmethod
    def create(cls, kernel: Kernel) -> "UnsavedThreadLimits | None":
        """Return the feature if there is a thread limit."""
        limited = any(limit.thread_limit is not None for limit in kernel.limits)
        return cls(kernel) if limited else None

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._warned = False

    def begin_run(self, state: State, feature_data: FeatureData) -> None:  # noqa: ARG002 - not of interest
        """Warn if neither a checkpointer nor a store keeps the counts of threads."""
        context = call_context(running_runtime())
        has_store = self.store is not None
        if self._warned or context.remembers or (has_store and context.run_thread_id is not None):
            return
        self._warned = True
        thread_id = '{"configurable": {"thread_id": …}}'
        remedy = "Give create_agent a checkpointer, or use run_limit"
        if has_store:
            remedy = f"Call the outermost graph with {thread_id}: the store counts by it"
        elif context.is_nested:
            remedy = (
                "To count all agents of a thread together, use QuotaMiddleware with "
                f"store=MemoryStore() or RedisStore(), and call the outermost graph with "
                f'{thread_id}, or limit the outermost run: Quota(…, per="root_run"). To count this '
                "agent alone, give create_agent checkpointer=True, and the outermost graph a "
                "checkpointer"
            )
        self._kernel.created_at.warn(
            f"{self._kernel.name} has a thread limit, but this agent's state does not outlive the "
            f"run: the limit holds within one run only. {remedy}"
        )


class MisspelledTools(Feature):
    """Advises once of names in limits that look misspelt."""

    @classmethod
    def create(cls, kernel: Kernel) -> "MisspelledTools | None":
        """Return the feature if limits name tools."""
        return cls(kernel) if any(limit.named_tools for limit in kernel.limits) else None

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._named = {name for limit in kernel.limits for name in limit.named_tools}

    def learn_tools(self, agent: str | None, tools: Sequence[Tool]) -> None:
        """Compare the names of the first tools that are offered."""
        offered = {*map(_tool_name, tools)}
        # A tool that a limit names is meant by that name only: agents share their limits.
        meant = {
            name: near[0]
            for name in sorted(self._named - offered)
            if (near := get_close_matches(name, offered - self._named, 1, _ALIKE))
        }
        if meant:
            self.recorder.log(_log_misspelt, agent_name(agent), meant)
        if tools:
            self._named = set()


def _tool_name(tool: Tool) -> str:
    """Return the name of a tool, including a provider's own tool or one in OpenAI's form."""
    if not isinstance(tool, dict):
        return str(tool.name)
    return str((tool.get("function") or tool).get("name") or tool.get("type"))


def _log_misspelt(agent: str, meant: Mapping[str, str]) -> None:
    hints = ", ".join(f"{name!r} (did you mean {tool!r}?)" for name, tool in meant.items())
    logger.warning("limits name tools that agent %r does not have: %s", agent, hints)

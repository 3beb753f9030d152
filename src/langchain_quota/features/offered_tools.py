"""Names of tools in limits that look misspelt, by the tools that agents offer their models."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from langchain_quota.middleware.feature import Feature
from langchain_quota.telemetry.recorder import Recorder

_ALIKE = 0.8
"""How alike two names must be, by `difflib`."""


class OfferedTools(Feature):
    """Advises once of names in limits that look misspelt."""

    @classmethod
    def of(cls, limiter: Any) -> "OfferedTools | None":
        """The feature, if limits name tools."""
        named = {name for limit in limiter.limits for name in limit.named_tools}
        return cls(named, limiter._recorder) if named else None  # noqa: SLF001 - the kernel's

    def __init__(self, named: set[str], recorder: Recorder) -> None:
        self._named = named
        self._recorder = recorder
        self._has_advised = False

    def learn(self, agent: str | None, tools: Sequence[Any]) -> None:
        """Compare the names of the first tools that are offered."""
        if not tools or self._has_advised:
            return
        self._has_advised = True
        offered = {*map(_tool_name, tools)}
        # A tool that a limit names is meant by that name only: agents share their limits.
        meant = {
            name: near[0]
            for name in sorted(self._named - offered)
            if (near := get_close_matches(name, offered - self._named, 1, _ALIKE))
        }
        if meant:
            self._recorder.warn_misspelt(agent, meant)


def _tool_name(tool: Any) -> str:
    """The name of a tool, also of a provider's own tool, or of one in OpenAI's form."""
    if not isinstance(tool, dict):
        return str(tool.name)
    return str((tool.get("function") or tool).get("name") or tool.get("type"))

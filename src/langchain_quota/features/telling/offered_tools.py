"""Which tools agents offer their models, and the names in limits that look misspelt."""

from collections.abc import Sequence
from difflib import get_close_matches
from operator import is_
from typing import Any

from langchain.agents.middleware.types import ModelRequest

from langchain_quota.limits import Limit
from langchain_quota.middleware._context import running_agent
from langchain_quota.telemetry.recorder import Recorder

_ALIKE = 0.8
"""How alike two names must be, by `difflib`."""


class OfferedTools:
    """The tools of the agents that a middleware holds to its limits."""

    def __init__(self, limits: Sequence[Limit], recorder: Recorder) -> None:
        self._named = {
            name for limit in limits for name in (*limit.tools, *getattr(limit, "exclude", ()))
        }
        self._recorder = recorder
        self._has_advised = False
        # Only one agent's tools are kept, so that those of agents that are gone can be freed.
        self._newest: tuple[str | None, list[Any]] = (None, [])

    def __getstate__(self) -> dict[str, object]:
        """What a copy has: not the tools, which may hold what cannot be copied."""
        return {**vars(self), "_newest": (None, [])}

    def learn(self, request: ModelRequest[Any]) -> bool:
        """Learn what the model is offered; whether it differs from what was learned last."""
        agent, tools = running_agent(), request.tools
        known, newest = self._newest
        if agent == known and len(tools) == len(newest) and all(map(is_, tools, newest)):
            return False
        self._newest = agent, [*tools]
        self._recorder.learn_tools(agent, [t.name for t in tools if not isinstance(t, dict)])
        if tools and not self._has_advised:
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
        return True


def _tool_name(tool: Any) -> str:
    """The name of a tool, also of a provider's own tool, or of one in OpenAI's form."""
    if not isinstance(tool, dict):
        return str(tool.name)
    return str((tool.get("function") or tool).get("name") or tool.get("type"))

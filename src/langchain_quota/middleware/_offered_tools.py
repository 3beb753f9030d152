"""Which tools agents offer their models, and the names in limits that no tool has."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from operator import is_
from typing import Any

from langchain.agents.middleware.types import ModelRequest

from langchain_quota.limits import Limit
from langchain_quota.middleware._context import running_agent
from langchain_quota.state import ledger
from langchain_quota.telemetry.recorder import Recorder

_SHOWN = 5
"""The most tools that a hint lists."""

_MOST_KNOWN = 10_000
"""How many tools of all agents are kept; beyond that, any name may belong to a tool."""

MOST_AGENTS = 1000
"""How many agents of one middleware get advice: new names may come without end."""


@dataclass(slots=True)
class _Agent:
    """What an agent offers.

    Attributes:
        names: Its own tools.
        run: The first run with these tools; `None` when nothing is left to log.
        advised: The names that have been logged, with their limits.
    """

    names: list[str]
    run: str | None
    advised: set[tuple[str, str]] = field(default_factory=set)


class OfferedTools:
    """The tools of the agents that a middleware holds to its limits.

    Args:
        limits: The limits.
        recorder: Records the tools, and logs the names in limits that no tool has.
    """

    def __init__(self, limits: Sequence[Limit], recorder: Recorder) -> None:
        self._limits = limits
        self._recorder = recorder
        self._agents: dict[str | None, _Agent] = {}
        # Only one agent's tools are kept here, so that those of agents that are gone can be freed.
        self._newest: tuple[_Agent | None, list[Any]] = (None, [])

    def __getstate__(self) -> dict[str, object]:
        """What a copy has: not the tools, which may hold what cannot be copied."""
        return {**vars(self), "_newest": (None, [])}

    def learn(self, request: ModelRequest[Any]) -> bool:
        """Learn what the model is offered, and log the names in limits that no tool has.

        Returns whether the tools differ from those that were learned last.

        A name that is surely misspelt is logged at once. Another agent may have the tool of any
        other name, so those are logged in the agent's second run.

        Args:
            request: What the running agent asks its model.
        """
        name = running_agent()
        agent = self._agents.get(name)
        run = ledger(request.state).get("run")
        newest, tools = self._newest
        are_same = len(tools) == len(request.tools) and all(map(is_, tools, request.tools))
        if are_same and agent is not None and agent is newest and agent.run in {None, run}:
            return False
        self._learn(name, agent, run, request.tools)
        self._newest = self._agents.get(name), [*request.tools]
        return True

    def _learn(
        self, name: str | None, agent: _Agent | None, run: str | None, tools: Sequence[Any]
    ) -> None:
        names = [tool.name for tool in tools if not isinstance(tool, dict)]
        if agent is not None and agent.names == names and agent.run in {None, run}:
            return
        offered = {_tool_name(tool) for tool in tools}
        if agent is None or agent.names != names:
            self._recorder.learn_tools(name, names)
            if len(self._recorder.offered_tools) < _MOST_KNOWN:
                self._recorder.offered_tools.update(offered)
            advised = set() if agent is None else agent.advised
            if agent is None and len(self._agents) >= MOST_AGENTS:
                return
            agent = self._agents[name] = _Agent(names, run, advised)
            # It is logged, since a tool may be offered later: a QuotaWarning could be an error.
            self._advise(name, agent, _misspelt(self._limits, offered))
        else:
            agent.run = None
            self._advise(name, agent, _unknown(self._limits, offered))

    def _advise(
        self, name: str | None, agent: _Agent, found: Iterator[tuple[str, str, str]]
    ) -> None:
        known = self._recorder.offered_tools
        for limit, tool, hint in found:
            is_known = tool in known or len(known) >= _MOST_KNOWN
            if (limit, tool) not in agent.advised and not is_known:
                agent.advised.add((limit, tool))
                self._recorder.warn_unknown_tool(name, limit, tool, hint)


def _misspelt(limits: Sequence[Limit], offered: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """The misspelt names in limits: the limit's name, the tool's name as given, and a hint."""
    for limit in limits:
        for name in (*limit.tools, *getattr(limit, "exclude", ())):
            near = sorted(tool for tool in offered if _is_meant(name, tool))
            if near and name not in offered:
                yield limit.name, name, _meant(near)


def _unknown(limits: Sequence[Limit], offered: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """The limited tools that the agent does not have: the limit's name, the tool's, and a hint."""
    for limit in limits:
        for name in limit.tools:
            if name not in offered:
                yield limit.name, name, _hint(name, offered)


def _is_meant(name: str, tool: str) -> bool:
    """Whether one name is the other one with a spelling mistake: agents often share their limits.

    A mistake is another case or separator, two letters swapped, or an inner letter missing. A name
    with something added, or with another letter or digit, may well be another tool.
    """
    short, long = sorted(map(_folded, (name, tool)), key=len)
    if len(short) == len(long):
        swapped = (short[:i] + short[i : i + 2][::-1] + short[i + 2 :] for i in range(len(short)))
        return _digits(short) == _digits(long) and (short == long or long in swapped)
    shortened = (long[:i] + long[i + 1 :] for i in range(len(long)) if not long[i].isdigit())
    return short not in long and short in shortened


def _folded(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))


def _hint(name: str, offered: Collection[str]) -> str:
    near = get_close_matches(name, offered)
    if near:
        return _meant(near)
    if not offered:
        return "it offers none"
    more = ", …" if len(offered) > _SHOWN else ""
    return f"name one of {', '.join(map(repr, sorted(offered)[:_SHOWN]))}{more}"


def _meant(near: Sequence[str]) -> str:
    return f"did you mean {' or '.join(map(repr, near))}?"


def _tool_name(tool: Any) -> str:
    """The name of a tool, also of a provider's own tool, or of one in OpenAI's form."""
    if not isinstance(tool, dict):
        return str(tool.name)
    return str((tool.get("function") or tool).get("name") or tool.get("type"))

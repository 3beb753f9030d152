"""Checks of the tools that an agent offers: code and sub-agents that no limit would see.

`CodeInterpreterMiddleware` of langchain-quickjs calls tools inside one call of its tool `eval`,
where no hook of a middleware sees the calls. The tool `task` of deepagents starts sub-agents.
"""

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any
from weakref import WeakSet

from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel

from langchain_quota.decision import Call
from langchain_quota.limits import Limit
from langchain_quota.middleware.feature import Feature
from langchain_quota.state import LEDGER
from langchain_quota.telemetry.labels import UNNAMED

_DEEPAGENTS = "deepagents.middleware.subagents"
"""Where the tool `task` of deepagents is defined."""
_INTERPRETER = "langchain_quickjs"
_SUB_AGENTS = "task"
"""The function by which code starts sub-agents, and the tool that it calls."""


class DeepAgents(Feature):
    """Refuses code that can call a limited tool, and warns of sub-agents without limits."""

    @classmethod
    def of(cls, limiter: Any) -> "DeepAgents":
        """The feature, which every middleware needs."""
        return cls(limiter)

    def __init__(self, limiter: Any) -> None:
        super().__init__(limiter)
        # The functions that start sub-agents and that have been checked already.
        self._checked: WeakSet[FunctionType] = WeakSet()

    def checked(self, agent: object) -> None:
        """Note that all sub-agents of an agent have limits, or are left out on purpose."""
        nodes = (node.bound for graph in _graphs_of(agent) for node in graph.nodes.values())
        for node in nodes:
            if isinstance(node, ToolNode):
                self._checked.update(_starters(node.tools_by_name.values()))

    def learn(self, agent: str | None, tools: Sequence[Any]) -> None:
        """Refuse to run an agent whose code can call a limited tool; warn of the rest once."""
        made_at = self._limiter._made_at  # noqa: SLF001 - the kernel gives it
        for start in _starters(tools):
            if start in self._checked:
                continue
            self._checked.add(start)
            unlimited = ", ".join(map(repr, _unlimited_sub_agents(start)))
            if unlimited:
                made_at.warn(
                    f"the sub-agents that the tool 'task' of agent {agent or UNNAMED!r} starts "
                    f"have no limits of langchain-quota: {unlimited}. Give them their parent's "
                    "limits: with_limits(create_deep_agent, quota)(…)"
                )
        if _INTERPRETER not in sys.modules:
            return
        for limit in sorted(self._limiter.limits, key=lambda each: not each.enforce):
            unseen = _unseen_calls(limit, tools)
            if unseen and limit.enforce:
                raise RuntimeError(unseen)
            if unseen:
                made_at.warn(unseen)
                return


def has_limits(runnable: object) -> bool:
    """Whether an agent, or a graph within it, keeps counts of ours."""
    return any(LEDGER in graph.channels for graph in _graphs_of(runnable))


def _graphs_of(runnable: object) -> list[Pregel[Any, Any, Any, Any]]:
    """A graph and those within it; none if it is no graph."""
    while isinstance(runnable, RunnableBindingBase):
        runnable = runnable.bound
    if not isinstance(runnable, Pregel):
        return []
    graphs = [runnable, *(graph for _, graph in runnable.get_subgraphs(recurse=True))]
    return [graph for graph in graphs if isinstance(graph, Pregel)]


def _starters(tools: Iterable[Any]) -> list[FunctionType]:
    """The functions that start sub-agents in tools: every agent of deepagents has its own one."""
    functions = (tool.func for tool in tools if isinstance(tool, StructuredTool))
    return [
        function
        for function in functions
        if isinstance(function, FunctionType) and function.__module__ == _DEEPAGENTS
    ]


def _unlimited_sub_agents(start: FunctionType) -> list[str]:
    """The names of the sub-agents without limits that a function starts, as far as is known."""
    # Only certain cases: a sub-agent that LangChain has not made is never named.
    agents = inspect.getclosurevars(start).nonlocals.get("subagent_graphs")
    if not isinstance(agents, Mapping):
        return []
    return [name for name, agent in agents.items() if _is_agent(agent) and not has_limits(agent)]


def _is_agent(graph: Any) -> bool:
    """Whether `create_agent` has made it, so that its middlewares have nodes of their own."""
    if not isinstance(graph, Pregel):
        return False
    metadata = (graph.config or {}).get("metadata") or {}
    return "model" in graph.nodes and "ls_integration" in metadata


def _unseen_calls(limit: Limit, tools: Sequence[Any]) -> str:
    """Says that a code interpreter would go past a limit, and what to do; empty if it does not."""
    for interpreter in tools:
        called = _called(interpreter, tools)
        unseen = [name for name in called if limit.matches(Call("tool", name))]
        if not unseen:
            continue
        names = [name for name in unseen if name != _SUB_AGENTS]
        remedies = [f"take {', '.join(map(repr, names))} out of its ptc=[…]"] if names else []
        if len(names) < len(unseen):
            remedies.append("give it subagents=False")
        excluding = ""
        if not limit.tools:
            excluding = f". Or leave them out of the limit: exclude={tuple(unseen)!r}"
        return (
            f"limit {limit.name!r} does not see what code calls: CodeInterpreterMiddleware calls "
            f"{', '.join(map(repr, unseen))} inside its tool {interpreter.name!r}. So "
            f"{' and '.join(remedies)}{excluding}"
        )
    return ""


def _called(interpreter: object, tools: Sequence[Any]) -> list[str]:
    """The names of the tools that the code of an interpreter's tool can call."""
    if not isinstance(interpreter, StructuredTool):
        return []
    function = interpreter.func or interpreter.coroutine
    if not (inspect.isfunction(function) and function.__module__.startswith(f"{_INTERPRETER}.")):
        return []
    others = [
        each for each in tools if isinstance(each, BaseTool) and each.name != interpreter.name
    ]
    settings = vars(inspect.getclosurevars(function).nonlocals.get("middleware", object))
    if not {"_ptc", "_subagents"} <= settings.keys():
        # It is another version of the package: its code may call any tool.
        return [each.name for each in others]
    names = [getattr(each, "name", each) for each in settings["_ptc"] or ()]
    # As the interpreter finds the tool that starts sub-agents.
    starts = {"description", "subagent_type"}
    if settings["_subagents"] and any(
        each.name == _SUB_AGENTS and starts <= each.args.keys() for each in others
    ):
        names.append(_SUB_AGENTS)
    return [name for name in names if name != interpreter.name]

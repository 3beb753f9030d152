"""Checks of an agent's tools for code and sub-agents that no limit would see.

`CodeInterpreterMiddleware` of langchain-quickjs calls tools inside one call of its tool `eval`,
where no hook of a middleware sees the calls. The tool `task` of deepagents starts sub-agents.
"""

import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from types import FunctionType
from weakref import WeakSet

from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel

from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call
from langchain_quota.middleware.context import CompiledGraph
from langchain_quota.middleware.feature import Feature, Tool
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.state import LEDGER
from langchain_quota.runtime import compat
from langchain_quota.telemetry.labels import UNNAMED

_PACKAGES: tuple[str, ...] = ("deepagents", "langchain_quickjs")
"""The packages whose tools are checked."""

_TASK = "task"
"""The function by which code starts sub-agents, and the tool that it calls."""


class DeepAgents(Feature):
    """Refuses code that can call a limited tool, and warns of sub-agents without limits."""

    @classmethod
    def create(cls, kernel: Kernel) -> "DeepAgents | None":
        """Return the feature if a package is installed whose tools it checks."""
        # The package may be imported later.
        installed = any(name in sys.modules or find_spec(name) for name in _PACKAGES)
        return cls(kernel) if installed else None

    def learn_tools(self, agent: str | None, tools: Sequence[Tool]) -> None:
        """Refuse to run an agent whose code can call a limited tool; warn of the rest once."""
        for start in _starters(tools):
            if start in _checked:
                continue
            _checked.add(start)
            unlimited = ", ".join(map(repr, _unlimited_sub_agents(start)))
            if unlimited:
                self._kernel.created_at.warn(
                    f"the sub-agents that the tool 'task' of agent {agent or UNNAMED!r} starts "
                    f"have no limits of langchain-quota: {unlimited}. Give them their parent's "
                    "limits: with_limits(create_deep_agent, quota)(…)"
                )
        for limit in self._kernel.limits:
            if limit.enforce:
                _check_interpreters(limit, tools)


_checked: WeakSet[FunctionType] = WeakSet()
"""The functions that start sub-agents and that have been checked."""


def trust_sub_agents(agent: object) -> None:
    """Note that all sub-agents of an agent have limits, or are left out on purpose."""
    for node in (node.bound for graph in _graphs_of(agent) for node in graph.nodes.values()):
        if isinstance(node, ToolNode):
            _checked.update(_starters(node.tools_by_name.values()))


def has_limits(runnable: object) -> bool:
    """Return whether an agent, or a graph within it, keeps our counts."""
    return any(LEDGER in graph.channels for graph in _graphs_of(runnable))


def _graphs_of(runnable: object) -> list[CompiledGraph]:
    """Return a graph and those within it; nothing if it is no graph."""
    while isinstance(runnable, RunnableBindingBase):
        runnable = runnable.bound
    if not isinstance(runnable, Pregel):
        return []
    graphs = [runnable, *(graph for _, graph in runnable.get_subgraphs(recurse=True))]
    return [graph for graph in graphs if isinstance(graph, Pregel)]


def _starters(tools: Iterable[Tool]) -> list[FunctionType]:
    """Return the functions in tools that start sub-agents: each deep agent has its own one."""
    functions = (tool.func for tool in tools if isinstance(tool, StructuredTool))
    return [
        function
        for function in functions
        if isinstance(function, FunctionType) and compat.starts_sub_agents(function)
    ]


def _unlimited_sub_agents(start: FunctionType) -> list[str]:
    """Return the names of the sub-agents without limits that a function starts, if known."""
    # Only certain cases: a sub-agent that `create_agent` has not made is never named.
    return [
        name
        for name, graph in compat.sub_agents_of(start).items()
        if isinstance(graph, Pregel)
        and compat.is_from_create_agent(graph)
        and not has_limits(graph)
    ]


def _check_interpreters(limit: Limit, tools: Sequence[Tool]) -> None:
    """Raise an exception if a code interpreter would go past a limit."""
    for interpreter in (tool for tool in tools if isinstance(tool, BaseTool)):
        unseen = [
            name
            for name in _called(interpreter, tools)
            if name != interpreter.name and limit.matches(Call("tool", name))
        ]
        if unseen:
            raise RuntimeError(
                f"limit {limit.name!r} does not see what code calls: CodeInterpreterMiddleware "
                f"calls {', '.join(map(repr, unseen))} inside its tool {interpreter.name!r}. Take "
                "tools out of its ptc=[…], and give it subagents=False for 'task'; or leave them "
                "out of a limit of all tools: exclude=(…)"
            )


def _called(interpreter: BaseTool, tools: Sequence[Tool]) -> list[str]:
    """Return the names of the tools that the code of an interpreter's tool can call."""
    function = isinstance(interpreter, StructuredTool) and (
        interpreter.func or interpreter.coroutine
    )
    settings = compat.interpreter_settings(function)
    offered = [tool.name for tool in tools if isinstance(tool, BaseTool)]
    if settings is None:
        # It is another version of the package: its code may call any tool.
        return offered
    names, starts_sub_agents = settings
    return [*names, _TASK] if starts_sub_agents and _TASK in offered else names

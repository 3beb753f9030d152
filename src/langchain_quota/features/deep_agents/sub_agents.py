"""Finds sub-agents without limits, which tools start."""

import inspect
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.tools import StructuredTool
from langgraph.pregel import Pregel

from langchain_quota.state import LEDGER

_DEEPAGENTS = "deepagents.middleware.subagents"
"""Where the tool `task` of deepagents is defined."""


def starters(tools: Iterable[Any]) -> list[FunctionType]:
    """The functions that start sub-agents in tools: every agent of deepagents has its own one."""
    functions = (tool.func for tool in tools if isinstance(tool, StructuredTool))
    return [
        function
        for function in functions
        if isinstance(function, FunctionType) and function.__module__ == _DEEPAGENTS
    ]


def unlimited_sub_agents(start: FunctionType) -> list[str]:
    """The names of the sub-agents without limits that a function starts."""
    # Only certain cases: a sub-agent that LangChain has not made is never named.
    agents = sub_agents(start)
    return [name for name, agent in agents.items() if _is_agent(agent) and not has_limits(agent)]


def sub_agents(start: FunctionType) -> Mapping[str, Any]:
    """The sub-agents that a function starts, by name, as far as they are known."""
    agents = inspect.getclosurevars(start).nonlocals.get("subagent_graphs")
    return agents if isinstance(agents, Mapping) else {}


def has_limits(runnable: object) -> bool:
    """Whether an agent, or a graph within it, keeps counts of ours."""
    return any(LEDGER in graph.channels for graph in graphs_of(runnable))


def graphs_of(runnable: object) -> list[Pregel[Any, Any, Any, Any]]:
    """A graph and those within it; none if it is no graph."""
    while isinstance(runnable, RunnableBindingBase):
        runnable = runnable.bound
    if not isinstance(runnable, Pregel):
        return []
    graphs = [runnable, *(graph for _, graph in runnable.get_subgraphs(recurse=True))]
    return [graph for graph in graphs if isinstance(graph, Pregel)]


def _is_agent(graph: Any) -> bool:
    """Whether `create_agent` has made it, so that its middlewares have nodes of their own."""
    if not isinstance(graph, Pregel):
        return False
    metadata = (graph.config or {}).get("metadata") or {}
    return "model" in graph.nodes and "ls_integration" in metadata

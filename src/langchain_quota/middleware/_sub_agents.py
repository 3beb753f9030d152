"""Tools that start agents of their own: which of those have no limits."""

import inspect
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

from langchain_core.tools import StructuredTool
from langgraph.pregel import Pregel

_DEEPAGENTS = "deepagents.middleware.subagents"
"""Where the tool `task` of deepagents is defined."""


def starters(tools: Iterable[Any]) -> list[FunctionType]:
    """The functions that start sub-agents in tools: of each agent of deepagents, one of its own."""
    functions = (tool.func for tool in tools if isinstance(tool, StructuredTool))
    return [
        function
        for function in functions
        if isinstance(function, FunctionType) and function.__module__ == _DEEPAGENTS
    ]


def unlimited_sub_agents(start: FunctionType, limiter: type) -> list[str]:
    """The names of the sub-agents without limits that a function starts.

    Only what is sure to be so: of a sub-agent that is no agent of LangChain's, nothing is said.

    Args:
        start: The function.
        limiter: The class of the middlewares that limit.
    """
    agents = inspect.getclosurevars(start).nonlocals.get("subagent_graphs")
    if not isinstance(agents, Mapping):
        return []
    return [
        name
        for name, agent in agents.items()
        if _is_agent(agent) and not _has_middleware(agent, limiter)
    ]


def _is_agent(graph: Any) -> bool:
    """Whether `create_agent` has made it, so that its middlewares have nodes of their own."""
    if not isinstance(graph, Pregel):
        return False
    metadata = (graph.config or {}).get("metadata") or {}
    return "model" in graph.nodes and "ls_integration" in metadata


def _has_middleware(agent: Pregel[Any, Any, Any, Any], kind: type) -> bool:
    """Whether a hook of a middleware of this class is a node of an agent."""
    hooks = (
        getattr(node.bound, form, None)
        for node in agent.nodes.values()
        for form in ("func", "afunc")
    )
    return any(isinstance(getattr(hook, "__self__", None), kind) for hook in hooks)

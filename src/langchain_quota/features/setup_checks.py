"""Checks of likely mistakes: counts that do not hold, misspelt tools, calls out of sight.

`CodeInterpreterMiddleware` of langchain-quickjs calls tools inside one call of its tool `eval`,
where no hook of a middleware sees the calls. The tool `task` of deepagents starts sub-agents.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from types import FunctionType
from weakref import WeakSet

from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel

from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call
from langchain_quota.limits.calls import ModelCallLimit, ToolCallLimit
from langchain_quota.middleware.context import (
    CompiledGraph,
    call_context,
    running_agent,
    running_config,
    running_runtime,
)
from langchain_quota.middleware.feature import Feature
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.state import LEDGER, FeatureData, State
from langchain_quota.runtime import compat
from langchain_quota.telemetry.labels import UNNAMED
from langchain_quota.telemetry.logs import agent_name, logger

_LIMITERS = {"model": "ModelCallLimitMiddleware", "__all__": "ToolCallLimitMiddleware"}
"""The names of LangChain's limiters, by what they count; others are limiters of one tool."""

_REVIEW = "HumanInTheLoopMiddleware.after_model"

_ALIKE = 0.8
"""How alike two names must be, by `difflib`."""

_PACKAGES: tuple[str, ...] = ("deepagents", "langchain_quickjs")

_TASK = "task"
"""The function by which code starts sub-agents, and the tool that it calls."""


class CountWarnings(Feature):
    """Warns once, when a run begins, of counts that are not saved, or that LangChain changes."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._warned = all(limit.thread_limit is None for limit in kernel.limits)
        self._has_reviewed_limits = any("tool" in limit.kinds for limit in kernel.limits)
        # The name of LangChain's limiter that counts the same calls, by the limit's.
        self._limiters = {
            limit.name: _LIMITERS.get(limit.counter, f"ToolCallLimitMiddleware[{limit.counter}]")
            for limit in kernel.limits
            if isinstance(limit, ModelCallLimit | ToolCallLimit)
        }

    def begin_run(self, state: State, feature_data: FeatureData) -> None:  # noqa: ARG002 - not of interest
        """Warn if nothing keeps the counts of threads, or LangChain's limiters count there, too."""
        nodes = _running_nodes()
        for limit, limiter in [*self._limiters.items()]:
            # One of ours also has a node that begins a run.
            if f"{limiter}.after_model" in nodes and f"{limiter}.before_agent" not in nodes:
                self._limiters.pop(limit, None)
                self._kernel.created_at.warn(
                    f"LangChain's {limiter} and limit {limit!r} count the same calls under one key "
                    f"of the state, so each call counts twice. Import {limiter.partition('[')[0]} "
                    "from langchain_quota, or write its numbers as a second limit beside this one"
                )
        # Hooks after the model are called in reverse order.
        order = [_REVIEW, f"{(name := self._kernel.name)}.after_model"]
        if self._has_reviewed_limits and [node for node in nodes if node in order] == order:
            self._has_reviewed_limits = False
            self._kernel.created_at.warn(
                f"HumanInTheLoopMiddleware is listed before {name}, so calls that a person rejects "
                f"stay charged, and edited ones are checked as they were: list {name} first"
            )
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
    """Advises once of names in limits that are not those of the agent's tools."""

    @classmethod
    def create(cls, kernel: Kernel) -> "MisspelledTools | None":
        """Return the feature if limits name tools."""
        return cls(kernel) if any(limit.named_tools for limit in kernel.limits) else None

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._named = {name for limit in kernel.limits for name in limit.named_tools}
        self._tools = [limit.tools for limit in kernel.limits]

    def begin_run(self, state: State, feature_data: FeatureData) -> None:  # noqa: ARG002 - not of interest
        """Compare the names with those of the first agent's tools."""
        offered = {tool.name for tool in _tools_of(_tool_nodes())} if self._tools else set[str]()
        if not offered:
            return
        # A tool that a limit names is meant by that name only: agents share their limits.
        meant = {
            name: near[0]
            for name in sorted(self._named - offered)
            if (near := get_close_matches(name, offered - self._named, 1, _ALIKE))
        }
        agent = agent_name(running_agent())
        if meant:
            self.recorder.log(_log_misspelt, agent, meant)
        missing = [name for tools in self._tools if offered.isdisjoint(tools) for name in tools]
        missing = [name for name in missing if name not in meant]
        if missing:
            self.recorder.log(_log_missing, agent, missing, sorted(offered))
        self._tools = []


def _running_nodes() -> Mapping[str, object]:
    """Return what the nodes of the running graph run, by their names."""
    return compat.nodes(running_config().get("configurable"))


def _tool_nodes() -> list[ToolNode]:
    """Return the nodes of tools of the running graph."""
    return [node for node in _running_nodes().values() if isinstance(node, ToolNode)]


def _tools_of(nodes: Iterable[ToolNode]) -> list[BaseTool]:
    return [tool for node in nodes for tool in node.tools_by_name.values()]


def _log_misspelt(agent: str, meant: Mapping[str, str]) -> None:
    hints = ", ".join(f"{name!r} (did you mean {tool!r}?)" for name, tool in meant.items())
    logger.warning("limits name tools that agent %r does not have: %s", agent, hints)


def _log_missing(agent: str, missing: list[str], offered: list[str]) -> None:
    names, tools = (", ".join(map(repr, each)) for each in (missing, offered))
    logger.info("a limit holds no tool of agent %r: %s; its tools are %s", agent, names, tools)


class DeepAgents(Feature):
    """Refuses code that can call a limited tool, and warns of sub-agents without limits."""

    @classmethod
    def create(cls, kernel: Kernel) -> "DeepAgents | None":
        """Return the feature if a package is installed whose tools it checks."""
        # The package may be imported later.
        installed = any(name in sys.modules or find_spec(name) for name in _PACKAGES)
        return cls(kernel) if installed else None

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        # Looking at many tools for many limits takes milliseconds, which is once for an agent.
        self._checked: WeakSet[ToolNode] = WeakSet()

    def begin_run(self, state: State, feature_data: FeatureData) -> None:  # noqa: ARG002 - not of interest
        """Refuse to run an agent whose code can call a limited tool; warn of the rest once."""
        nodes = _tool_nodes()
        if self._checked.issuperset(nodes):
            return
        tools = _tools_of(nodes)
        for start in _starters(tools):
            if start in _checked:
                continue
            _checked.add(start)
            unlimited = ", ".join(map(repr, _unlimited_sub_agents(start)))
            if unlimited:
                agent = running_agent() or UNNAMED
                self._kernel.created_at.warn(
                    f"the sub-agents that the tool 'task' of agent {agent!r} starts "
                    f"have no limits of langchain-quota: {unlimited}. Give them their parent's "
                    "limits: with_limits(create_deep_agent, quota)(…)"
                )
        for limit in self._kernel.limits:
            if limit.enforce:
                _check_interpreters(limit, tools)
        self._checked.update(nodes)


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


def _starters(tools: Iterable[BaseTool]) -> list[FunctionType]:
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


def _check_interpreters(limit: Limit, tools: Sequence[BaseTool]) -> None:
    """Raise an exception if a code interpreter would go past a limit."""
    for interpreter in tools:
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


def _called(interpreter: BaseTool, tools: Sequence[BaseTool]) -> list[str]:
    """Return the names of the tools that the code of an interpreter's tool can call."""
    function = isinstance(interpreter, StructuredTool) and (
        interpreter.func or interpreter.coroutine
    )
    settings = compat.interpreter_settings(function)
    offered = [tool.name for tool in tools]
    if settings is None:
        # It is another version of the package: its code may call any tool.
        return offered
    names, starts_sub_agents = settings
    return [*names, _TASK] if starts_sub_agents and _TASK in offered else names

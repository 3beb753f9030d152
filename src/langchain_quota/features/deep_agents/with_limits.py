"""deepagents: one middleware for the main agent and all that its tool `task` starts."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial, wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

from langchain.agents.middleware.types import AgentMiddleware
from langchain_core.tools import BaseTool
from langgraph.prebuilt import ToolNode

from langchain_quota.arguments import check_type
from langchain_quota.features.deep_agents.checks import DeepAgents
from langchain_quota.features.deep_agents.sub_agents import (
    graphs_of,
    has_limits,
    starters,
    sub_agents,
)
from langchain_quota.middleware.quota import QuotaMiddleware

Arguments = ParamSpec("Arguments")
Agent = TypeVar("Agent")

_GENERAL_PURPOSE = "general-purpose"

_INHERITED = (
    "FilesystemMiddleware",
    "SummarizationMiddleware",
    "PatchToolCallsMiddleware",
    "SkillsMiddleware",
    "AnthropicPromptCachingMiddleware",
    "BedrockPromptCachingMiddleware",
    "FireworksPromptCachingMiddleware",
)
"""The middlewares that deepagents gives to every agent, by name.

The automatic `general-purpose` takes over what replaces them in the main agent, and nothing else.
"""


def with_limits(
    create: Callable[Arguments, Agent],
    quota: QuotaMiddleware[Any, Any],
    *,
    leave_out: Collection[str] = (),
) -> Callable[Arguments, Agent]:
    """Make `create_deep_agent` hold an agent and its sub-agents to the same limits.

    The function that it returns takes the arguments of `create_deep_agent`. It adds `quota` to
    the main agent, to the automatic sub-agent `general-purpose`, and to each declared sub-agent
    that has no `QuotaMiddleware` of its own.

    Args:
        create: `deepagents.create_deep_agent`, or a function that passes `middleware` and
            `subagents` on to it.
        quota: The limits, with the store in which all these agents are counted.
        leave_out: The names of sub-agents that stay as they are: they are limited elsewhere, or
            need no limits. A remote sub-agent and a compiled one without limits must be named.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `quota` has no store. Or, when the agent is made: a sub-agent cannot be given
            limits, `leave_out` has a name that no sub-agent has, `middleware` has another
            `QuotaMiddleware`, or code that an agent writes can call a limited tool, where no
            limit sees the call.

    Examples:
        >>> from langchain_quota import MemoryStore, QuotaMiddleware, ToolCallLimit, with_limits
        >>> from langchain_quota.testing import ScriptedChatModel
        >>> def make_agent() -> object:
        ...     from deepagents import create_deep_agent
        ...     limits = [ToolCallLimit("read_file", thread_limit=50)]
        ...     quota = QuotaMiddleware(limits, store=MemoryStore())
        ...     return with_limits(create_deep_agent, quota)(ScriptedChatModel(script=["Hello."]))
    """
    _check(create, quota, leave_out)
    # The signature of a `partial` does not show all that is preset.
    preset = create if isinstance(create, partial) else partial(create)
    declared = signature(preset.func)
    parameters = declared.parameters
    other_names = next(
        (each.name for each in parameters.values() if each.kind is Parameter.VAR_KEYWORD), ""
    )

    @wraps(create)
    def create_with_limits(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Agent:
        bound = declared.bind_partial(*preset.args, *args, **{**preset.keywords, **kwargs})
        bound.apply_defaults()
        # Arguments that **kwargs takes are in a dict of their own.
        others: dict[str, Any] = bound.arguments.get(other_names, {})
        given = {**bound.arguments, **others}
        middleware = list(given.get("middleware") or ())
        _check_middleware(middleware, quota)
        specs = list(given.get("subagents") or ())
        _check_specs(specs, leave_out)
        names = {*leave_out, *(spec["name"] for spec in specs)}
        if _GENERAL_PURPOSE not in names:
            specs.insert(0, _general_purpose({**given, "middleware": middleware}))
        specs = [spec if spec["name"] in leave_out else _limited(spec, quota) for spec in specs]
        limited = {"middleware": _with_quota(middleware, quota), "subagents": specs}
        for name, value in limited.items():
            (bound.arguments if name in parameters else others)[name] = value
        agent = preset.func(*bound.args, **bound.kwargs)
        tools = _tools(agent)
        starts = starters(tools)
        _check_interpreters("the main agent", tools, quota)
        agents = {name: each for start in starts for name, each in sub_agents(start).items()}
        for name, own in _quotas(specs):
            if name in agents and name not in leave_out:
                _check_interpreters(f"sub-agent {name!r}", _tools(agents[name]), own)
        # All sub-agents have limits, or are left out on purpose.
        _checks_of(quota).checked(starts)
        return agent

    return create_with_limits


def _general_purpose(given: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of the sub-agent that deepagents would add itself."""
    # deepagents is no dependency of ours, but the caller of this has it.
    from deepagents.middleware.subagents import GENERAL_PURPOSE_SUBAGENT  # noqa: PLC0415

    spec: dict[str, Any] = {**GENERAL_PURPOSE_SUBAGENT}
    spec["middleware"] = [each for each in given["middleware"] if each.name in _INHERITED]
    if given.get("skills") is not None:
        spec["skills"] = given["skills"]
    if isinstance(given.get("model"), str):
        # deepagents looks for the model's profile by this text.
        spec["model"] = given["model"]
    return spec


def _limited(spec: Mapping[str, Any], quota: QuotaMiddleware[Any, Any]) -> Mapping[str, Any]:
    """A sub-agent's spec with limits."""
    name = spec["name"]
    if "graph_id" in spec:
        raise ValueError(
            f"sub-agent {name!r} runs on another server, where this quota cannot hold it: give it "
            f"a QuotaMiddleware there, and name it here with leave_out=[{name!r}]"
        )
    if "runnable" not in spec:
        return {**spec, "middleware": _with_quota(spec.get("middleware"), quota)}
    if not has_limits(spec["runnable"]):
        raise ValueError(
            f"sub-agent {name!r} is compiled without limits: build it with middleware=[quota], or "
            f"leave it as it is with leave_out=[{name!r}]"
        )
    return spec


def _with_quota(
    middleware: Sequence[AgentMiddleware[Any, Any, Any]] | None, quota: QuotaMiddleware[Any, Any]
) -> list[AgentMiddleware[Any, Any, Any]]:
    """The middlewares with the quota, unless they have one."""
    present = list(middleware or ())
    if any(isinstance(each, QuotaMiddleware) for each in present):
        return present
    # One that judges in the model's own node comes first; any other comes after those whose hooks
    # can jump.
    inline = "model" in quota._judging_nodes()  # noqa: SLF001 - of this package
    return [quota, *present] if inline else [*present, quota]


def _tools(agent: object) -> list[BaseTool]:
    """The tools of an agent, or of a graph around it."""
    nodes = (node.bound for graph in graphs_of(agent) for node in graph.nodes.values())
    return [
        tool for node in nodes if isinstance(node, ToolNode) for tool in node.tools_by_name.values()
    ]


def _quotas(specs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, QuotaMiddleware[Any, Any]]]:
    """The declared sub-agents, each with its quota."""
    for spec in specs:
        for each in spec.get("middleware") or ():
            if isinstance(each, QuotaMiddleware):
                yield spec["name"], each


def _check_interpreters(
    agent: str, tools: Sequence[BaseTool], quota: QuotaMiddleware[Any, Any]
) -> None:
    """Check that no code which an agent writes can call a tool past its limit."""
    unseen = _checks_of(quota).unseen(tools)
    if unseen is not None:
        raise ValueError(f"{agent}: {unseen}")


def _checks_of(quota: QuotaMiddleware[Any, Any]) -> DeepAgents:
    """What a quota checks of tools."""
    features = quota._features  # noqa: SLF001 - of this package
    return next(each for each in features if isinstance(each, DeepAgents))


def _check(create: Any, quota: Any, leave_out: object) -> None:
    """Check the arguments of `with_limits`."""
    if not callable(create) or not _takes_sub_agents(create):
        raise TypeError(
            "create must be create_deep_agent, or a function that takes middleware and subagents, "
            f"not {create!r}"
        )
    check_type("quota", quota, QuotaMiddleware, "a QuotaMiddleware")
    if quota._store is None:  # noqa: SLF001 - of this package
        raise ValueError(
            "quota has no store, so each agent would count for itself: give it one, "
            "QuotaMiddleware(limits, store=MemoryStore()) in one process, or a RedisStore in "
            "several"
        )
    if isinstance(leave_out, str) or not isinstance(leave_out, Collection):
        raise TypeError(f"leave_out must be several names, not {leave_out!r}")


def _check_middleware(
    middleware: Sequence[AgentMiddleware[Any, Any, Any]] | None, quota: QuotaMiddleware[Any, Any]
) -> None:
    """Check that the main agent has no other quota."""
    for each in middleware or ():
        if isinstance(each, QuotaMiddleware) and each is not quota:
            raise ValueError(
                f"middleware has {each.name}, which is not the quota of with_limits: put all "
                "limits into one QuotaMiddleware, and give it to with_limits"
            )


def _takes_sub_agents(create: Callable[..., object]) -> bool:
    parameters = signature(create).parameters
    has_any = any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())
    return has_any or {"middleware", "subagents"} <= parameters.keys()


def _check_specs(specs: Sequence[object], leave_out: Collection[str]) -> None:
    """Check the sub-agents that are declared."""
    names = {_GENERAL_PURPOSE}
    for spec in specs:
        if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
            raise TypeError(f"subagents must be dicts, each with a name, not {spec!r}")
        names.add(spec["name"])
    for name in leave_out:
        if name not in names:
            raise ValueError(
                f"leave_out names {name!r}, and no sub-agent has that name: name one of "
                f"{', '.join(map(repr, sorted(names)))}"
            )

"""`with_limits` for deepagents: the same limits for the main agent and its sub-agents."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from langchain_quota.agents.quota import QuotaMiddleware
from langchain_quota.features.setup_checks import has_limits, trust_sub_agents
from langchain_quota.middleware.feature import Middleware
from langchain_quota.runtime.arguments import short_repr

Arguments = ParamSpec("Arguments")
Agent = TypeVar("Agent")

_MISSING: Any = None  # the error says what it should be
SubAgentSpec = Mapping[str, Any]
"""The spec of a sub-agent, or the arguments of `create_deep_agent`."""

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
    quota: QuotaMiddleware = _MISSING,
    *,
    leave_out: Collection[str] = (),
) -> Callable[Arguments, Agent]:
    """Make `create_deep_agent` hold an agent and its sub-agents to the same limits.

    The function that it returns takes the arguments of `create_deep_agent`. It adds `quota` to
    the main agent, to the automatic sub-agent `general-purpose`, and to each declared sub-agent
    that has no `QuotaMiddleware` of its own.

    Args:
        create: `deepagents.create_deep_agent`, or a function that takes the keyword arguments
            `middleware` and `subagents` and passes them on to it.
        quota: The limits, with the store in which all these agents are counted.
        leave_out: The names of sub-agents that stay as they are: they are limited elsewhere, or
            need no limits. A remote sub-agent and a compiled one without limits must be named.

    Raises:
        TypeError: `create` is no function, or `quota` no `QuotaMiddleware`.
        ValueError: `quota` has no store. Or, when the agent is made: a sub-agent cannot be given
            limits, `leave_out` has a name that no sub-agent has, or `middleware` has another
            `QuotaMiddleware`.

    Examples:
        >>> from langchain_quota import MemoryStore, QuotaMiddleware, ToolCallLimit, with_limits
        >>> quota = QuotaMiddleware([ToolCallLimit(run_limit=50)], store=MemoryStore())
        >>> def make_agent(model: str) -> object:
        ...     from deepagents import create_deep_agent
        ...     return with_limits(create_deep_agent, quota)(model)
    """
    if not (callable(create) and isinstance(quota, QuotaMiddleware)):
        raise TypeError(
            "with_limits takes create_deep_agent and a QuotaMiddleware, not "
            f"{short_repr(create)} and {short_repr(quota)}: write "
            "with_limits(create_deep_agent, quota)(model, …)"
        )
    if quota.kernel.store is None:
        raise ValueError(
            "quota has no store, so each agent would count for itself: give it one, "
            "QuotaMiddleware(limits, store=MemoryStore()) in one process, or a RedisStore in "
            "several"
        )
    create_agent: Any = create
    parameters = signature(create_agent).parameters.values()
    defaults = {arg.name: arg.default for arg in parameters if arg.default is not arg.empty}

    @wraps(create)
    def create_with_limits(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Agent:
        # The signature of a `partial` does not show all that is preset.
        settings = {**defaults, **getattr(create_agent, "keywords", {}), **kwargs}
        # The model may be the first argument.
        for model in (*getattr(create_agent, "args", ()), *args)[:1]:
            settings["model"] = model
        middleware = list(settings.get("middleware") or ())
        specs = list(settings.get("subagents") or ())
        names = {spec["name"] for spec in specs}
        if any(isinstance(item, QuotaMiddleware) and item is not quota for item in middleware):
            raise ValueError(
                "middleware has a QuotaMiddleware which is not the quota of with_limits: put all "
                "limits into one QuotaMiddleware, and give it to with_limits"
            )
        all_names = {_GENERAL_PURPOSE, *names}
        if not all_names.issuperset(leave_out):
            raise ValueError(
                f"leave_out={[*leave_out]!r} names no sub-agent: name some of {sorted(all_names)!r}"
            )
        if _GENERAL_PURPOSE not in {*leave_out, *names}:
            specs.insert(0, _general_purpose({**settings, "middleware": middleware}))
        specs = [spec if spec["name"] in leave_out else _limited(spec, quota) for spec in specs]
        limited = {"middleware": _with_quota(middleware, quota), "subagents": specs}
        agent: Agent = create_agent(*args, **{**kwargs, **limited})
        trust_sub_agents(agent)
        return agent

    return create_with_limits


def _general_purpose(settings: SubAgentSpec) -> SubAgentSpec:
    """Return the spec of the sub-agent that deepagents would add itself."""
    # deepagents is no dependency of ours, but the caller of this has it.
    from deepagents.middleware.subagents import GENERAL_PURPOSE_SUBAGENT  # noqa: PLC0415

    spec: dict[str, Any] = {**GENERAL_PURPOSE_SUBAGENT}
    spec["middleware"] = [item for item in settings["middleware"] if item.name in _INHERITED]
    if settings.get("skills") is not None:
        spec["skills"] = settings["skills"]
    if isinstance(settings.get("model"), str):
        # deepagents looks for the model's profile by this text.
        spec["model"] = settings["model"]
    return spec


def _limited(spec: SubAgentSpec, quota: QuotaMiddleware) -> SubAgentSpec:
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
    middleware: Sequence[Middleware] | None, quota: QuotaMiddleware
) -> list[Middleware]:
    """Return the middlewares with the quota, unless they have one."""
    present = list(middleware or ())
    if any(isinstance(item, QuotaMiddleware) for item in present):
        return present
    # A middleware that checks in the model's own node comes first; any other comes after those
    # whose hooks can jump.
    return [quota, *present] if quota.checks_inline else [*present, quota]

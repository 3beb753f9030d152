"""What the model is told of its budget, and which tools it is offered."""

from collections.abc import Sequence
from typing import Any

from langchain.agents.middleware.types import ModelRequest
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage

from langchain_quota.decision import Call, Level, level
from langchain_quota.engine import Used, exhausted_scope
from langchain_quota.limits import SCOPES, Terms

LAST_CALL = (
    "This is the last model call of this budget: no tool can be called any more. "
    "Give your final answer now."
)
NO_TOOLS = "No tool may be called now: every tool call will be refused."


def remaining(terms: Sequence[Terms], usage: dict[str, Used], *, near: float) -> str | None:
    """The note on what is left; `None` while no limit is near.

    Args:
        terms: The limits at this moment; those that are not enforced are not mentioned.
        usage: The counts by limit name; of the model, with this call.
        near: The share from which a limit without one of its own is near.
    """
    enforced = [each for each in terms if each.limit.enforce]
    if not any(_is_near(each, usage[each.limit.name], near) for each in enforced):
        return None
    parts = [part for each in enforced if (part := _part(each, usage[each.limit.name]))]
    return f"Budget: {'; '.join(parts)}."


def with_note(messages: Sequence[AnyMessage], note: str) -> list[AnyMessage]:
    """The messages with a note at the end of the newest human message.

    Not as a message of its own: some providers refuse a system message in mid-list, and a
    changing system prompt defeats their caching.
    """
    told = list(messages)
    for index in range(len(told) - 1, -1, -1):
        message = told[index]
        if isinstance(message, HumanMessage):
            content: Any = message.content
            content = (
                f"{content}\n\n{note}"
                if isinstance(content, str)
                else [*content, {"type": "text", "text": note}]
            )
            told[index] = message.model_copy(update={"content": content})
            return told
    return [*told, HumanMessage(note)]


def without_exhausted(
    request: ModelRequest[Any], terms: Sequence[Terms], usage: dict[str, Used]
) -> tuple[ModelRequest[Any], str | None]:
    """The request without the tools that have nothing left, and a note if they have to stay."""
    kept = [
        tool
        for tool in request.tools
        if isinstance(tool, dict) or not _is_exhausted(tool.name, terms, usage)
    ]
    if len(kept) == len(request.tools):
        return request, None
    return _offer(request, kept)


def last_call(request: ModelRequest[Any]) -> ModelRequest[Any]:
    """The request of the last admitted call: no tools but that for the structured response."""
    offered, _ = _offer(request, [])
    return offered.override(messages=with_note(offered.messages, LAST_CALL))


def _offer(request: ModelRequest[Any], tools: list[Any]) -> tuple[ModelRequest[Any], str | None]:
    """Offer these tools, unless the provider might refuse the request.

    Some refuse an empty list of tools where the history has tool calls.
    """
    has_history = any(
        isinstance(message, AIMessage) and message.tool_calls for message in request.messages
    )
    if not tools and has_history and not _has_structured_tool(request):
        return request.override(tool_choice=None), NO_TOOLS
    offered = {tool.name for tool in tools if not isinstance(tool, dict)}
    hidden = {tool.name for tool in request.tools if not isinstance(tool, dict)} - offered
    drops_choice = not tools or _chosen(request.tool_choice) in hidden
    tool_choice = None if drops_choice else request.tool_choice
    return request.override(tools=tools, tool_choice=tool_choice), None


def _has_structured_tool(request: ModelRequest[Any]) -> bool:
    """Whether LangChain is sure to add a tool for the structured response to the request.

    With an automatic strategy it does so unless it knows that the model has structured output of
    its own, by the model's profile or, without one, by its name.
    """
    strategy = request.response_format
    if strategy is None or isinstance(strategy, ProviderStrategy):
        return False
    if isinstance(strategy, ToolStrategy):
        return True
    profile = request.model.profile
    if profile is not None:
        return not profile.get("structured_output")
    return not any(getattr(request.model, name, None) for name in ("model_name", "model"))


def _chosen(tool_choice: Any) -> str | None:
    """The tool that a choice names: by name, as OpenAI, or as Anthropic writes it."""
    if isinstance(tool_choice, dict):
        name = (tool_choice.get("function") or tool_choice).get("name")
        return str(name)
    return tool_choice if isinstance(tool_choice, str) else None


def _is_exhausted(tool: str, terms: Sequence[Terms], usage: dict[str, Used]) -> bool:
    call = Call("tool", tool)
    return any(
        each.limit.enforce
        and each.limit.matches(call)
        and exhausted_scope(each, usage[each.limit.name], call.amount) is not None
        for each in terms
    )


def _numbers(terms: Terms, used: Used) -> list[tuple[int, int]]:
    """Used and limit of each scope that has one, the scarcest first."""
    numbers = [
        (used.thread if scope == "thread" else used.run, limit)
        for scope in SCOPES
        if (limit := terms.threshold(scope)) is not None
    ]
    # Where the store did not tell its counts there are none.
    numbers += [
        (count, quota.limit) for quota, count in zip(terms.quotas, used.quotas, strict=False)
    ]
    return sorted(numbers, key=lambda number: number[1] - number[0])


def _is_near(terms: Terms, used: Used, near: float) -> bool:
    share = near if terms.limit.near is None else terms.limit.near
    return any(level(count, limit, share) is not Level.OK for count, limit in _numbers(terms, used))


def _part(terms: Terms, used: Used) -> str | None:
    numbers = _numbers(terms, used)
    if not numbers:
        return None
    count, limit = numbers[0]
    if terms.limit.kind == "model":
        return f"this is model call {count} of {limit}"
    return f"{_subject(terms)}: {max(0, limit - count)} of {limit} left"


def _subject(terms: Terms) -> str:
    limit = terms.limit
    if limit.tools:
        return ", ".join(limit.tools)
    excluded = getattr(limit, "exclude", ())
    return f"all tools but {', '.join(excluded)}" if excluded else "all tools"

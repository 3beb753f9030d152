"""What a model request says of the budget, and which tools it offers."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from langchain.agents.middleware.types import ModelRequest
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage

from langchain_quota.admission import admit
from langchain_quota.decision import Call, Level, level
from langchain_quota.limits import Limit
from langchain_quota.middleware._model_calls import model_counts
from langchain_quota.resolved import ResolvedLimits, run_counter, thread_counter
from langchain_quota.state import run_tools, thread_tools

LAST_CALL = (
    "This is the last model call of this budget: no tool can be called any more. "
    "Give your final answer now."
)
_SHOWN = 5
"""The most tools that a hint lists."""

_SURELY_MEANT = 0.8
"""How alike an excluded name and a tool must be: agents often share their exclusions."""

NO_TOOLS = "No tool may be called now: every tool call will be refused."


def counts_now(
    state: Mapping[str, Any], limits: ResolvedLimits, kept: Mapping[str, int]
) -> dict[str, int]:
    """The counts by the name of the counter: the store's, and the state's for all others.

    Args:
        state: The state.
        limits: The limits.
        kept: The store's counts, by key.
    """
    thread, run = thread_tools(state), run_tools(state)
    counts = model_counts(state)
    for each in limits.limits:
        if each.limit.kind == "tool":
            counter = each.limit.counter
            counts[thread_counter(each.limit)] = thread.get(counter, 0)
            counts[run_counter(each.limit)] = run.get(counter, 0)
    for each in limits.limits:
        for row in limits.rows(each):
            counts[row.counter] = kept.get(row.key or "", counts.get(row.counter, 0))
    return counts


def remaining(limits: ResolvedLimits, counts: Mapping[str, int], *, near: float) -> str | None:
    """The note on what is left; `None` while no limit is near.

    Args:
        limits: The limits; those that are not enforced are not mentioned.
        counts: The counts by name; of the model, with this call.
        near: The share from which a limit without one of its own is near.
    """
    is_near = False
    parts = []
    for each in limits.limits:
        numbers = [
            (counts[row.counter], row.most) for row in limits.rows(each) if row.most is not None
        ]
        if not each.limit.enforce or not numbers:
            continue
        share = near if each.limit.near is None else each.limit.near
        is_near = is_near or any(level(*number, share) is not Level.OK for number in numbers)
        count, most = min(numbers, key=lambda number: number[1] - number[0])
        if each.limit.kind == "model":
            parts.append(f"this is model call {count} of {most}")
        else:
            parts.append(f"{_subject(each.limit)}: {max(0, most - count)} of {most} left")
    return f"Budget: {'; '.join(parts)}." if is_near else None


def with_note(messages: Sequence[AnyMessage], note: str) -> list[AnyMessage]:
    """The messages with a note at the end of the newest human message.

    Not as a message of its own: some providers refuse a system message in mid-list, and a
    changing system prompt defeats their caching.
    """
    noted = list(messages)
    for index in range(len(noted) - 1, -1, -1):
        message = noted[index]
        if isinstance(message, HumanMessage):
            content: Any = message.content
            content = (
                f"{content}\n\n{note}"
                if isinstance(content, str)
                else [*content, {"type": "text", "text": note}]
            )
            noted[index] = message.model_copy(update={"content": content})
            return noted
    return [*noted, HumanMessage(note)]


def without_exhausted(
    request: ModelRequest[Any], limits: ResolvedLimits, counts: Mapping[str, int]
) -> tuple[ModelRequest[Any], str | None]:
    """The request without the tools that have nothing left, and a note if they have to stay."""

    def is_left(tool: str) -> bool:
        return admit([limits.asked(Call("tool", tool)).hits], counts, {}).admitted[0]

    kept = [tool for tool in request.tools if isinstance(tool, dict) or is_left(tool.name)]
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


def _subject(limit: Limit) -> str:
    if limit.tools:
        return ", ".join(limit.tools)
    excluded = getattr(limit, "exclude", ())
    return f"all tools but {', '.join(excluded)}" if excluded else "all tools"


def unknown_tools(
    limits: Sequence[Limit], offered: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """The names in limits that no tool has: the limit's name, the tool's, and what to do.

    Args:
        limits: The limits.
        offered: The tools that the agent has.
    """
    for limit in limits:
        for name in limit.tools:
            if name not in offered:
                yield limit.name, name, _hint(name, offered)
        for name in getattr(limit, "exclude", ()):
            if name not in offered:
                near = get_close_matches(name, offered, cutoff=_SURELY_MEANT)
                if near:
                    yield limit.name, name, _meant(near)


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


def tool_name(tool: Any) -> str:
    """The name of a tool, also of a provider's own, or one that is written as OpenAI does."""
    if not isinstance(tool, dict):
        return str(tool.name)
    return str((tool.get("function") or tool).get("name") or tool.get("type"))

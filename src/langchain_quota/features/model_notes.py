"""Notes to the model about what is left, and the tools that it is offered."""

from collections.abc import Collection, Mapping, Sequence

from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage

from langchain_quota.core.admission import admit
from langchain_quota.core.plans import LimitSet, Places, read_keys
from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call
from langchain_quota.limits.calls import RepeatLimit
from langchain_quota.limits.options import (
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    TOTAL_TOKENS,
    UNCACHED_TOKENS,
)
from langchain_quota.middleware.feature import Feature, Request, Tool
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.history import Block
from langchain_quota.middleware.state import State, ledger
from langchain_quota.runtime.sync_async import Mode
from langchain_quota.runtime.units import Level, as_dollars, as_time, level
from langchain_quota.stores import QuotaUsage

LAST_CALL = (
    "This is the last model call of this budget: no tool can be called any more. "
    "Give your final answer now."
)
_OF_ONE_PROVIDER = {
    *("computer_call_output", "custom_tool_call_output", "non_standard", "tool_result")
}
"""Forms of a tool's answer, or parts of one, to which no text can be added."""

_DOWNGRADED = "The budget is nearly used up: a cheaper model answers from now on."

NO_TOOLS = "No tool may be called now: every tool call will be refused."

_SPENT = {
    TOTAL_TOKENS: "tokens",
    INPUT_TOKENS: "input tokens",
    OUTPUT_TOKENS: "output tokens",
    UNCACHED_TOKENS: "uncached tokens",
}
"""The names of budgets of tokens in a note."""


def added_to(places: Places, usages: Mapping[str, QuotaUsage]) -> dict[str, int]:
    """Return what grants and rollover add to counts, by name; what will roll over included."""
    added = {}
    for name, place in places.items():
        usage = usages.get(place.key)
        added[name] = usage.granted if usage else 0
        if place.rollover is not None and (usage is None or usage.rolled_over is None):
            previous = usages.get(place.rollover.previous)
            added[name] += place.rollover.of(previous.used if previous else 0)
    return added


class ModelNotes(Feature):
    """Tells the model what is left, offers only tools that it may call, asks for a last answer."""

    @classmethod
    def create(cls, kernel: Kernel) -> "ModelNotes | None":
        """Return the feature if an option or a limit needs it."""
        feature = cls(kernel)
        is_needed = feature._tells or feature._hides or cls.needed_hooks(kernel.limits)
        return feature if is_needed else None

    @classmethod
    def needed_hooks(cls, limits: Sequence[Limit]) -> Collection[str]:
        """Return the hook after the model, which answers what the last call asks for."""
        finalizes = any(limit.exit_behavior == "finalize" for limit in limits)
        return ("after_model",) if finalizes else ()

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        options = kernel.options
        self._tells: bool = options["tell_model"]
        self._hides: bool = options["hide_exhausted"]

    async def shape_request(self, mode: Mode, request: Request) -> Request:
        """Return the request for the model: with a note, and only the tools that it may call."""
        state: State = request.state
        if ledger(state).get("final"):
            # The last admitted call has no tools, except for the structured response.
            offered, _ = _offer(request, [])
            return offered.override(messages=_with_note(offered.messages, LAST_CALL))
        if not (self._tells or self._hides):
            return request
        limits, places = await self._kernel.resolve_limits(mode, None, state, request.runtime)
        usages: Mapping[str, QuotaUsage] | None = {}
        if self.store is not None:
            usages = await self.store.peek(mode, read_keys(places))
        if usages is None:
            # The store did not answer: show what the state knows, and no quota.
            limits, places, usages = limits.without_store("allow"), {}, {}
        limits = limits.raised(added_to(places, usages))
        counts = self._kernel.state_counts(state, limits.by_name.values())
        for meter in (meter for rule in limits.rules for meter in rule.meters):
            counts.setdefault(meter.counter, 0)
        counts |= {
            name: max(0, usages[place.key].used)
            for name, place in places.items()
            if place.key in usages
        }
        notes: list[str | None] = []
        if self._tells:
            downgraded = _DOWNGRADED if ledger(state).get("downgraded") else None
            notes = [downgraded, _remaining(limits, counts, near=self.recorder.near)]
        if self._hides:
            request, note = _without_exhausted(request, limits, counts)
            notes.append(note)
        text = " ".join(note for note in notes if note)
        return request.override(messages=_with_note(request.messages, text)) if text else request


def _remaining(limits: LimitSet, counts: Mapping[str, int], *, near: float) -> str | None:
    """Return the note on what is left; `None` while no limit is near."""
    is_near = False
    parts = []
    for limit, meters in ((rule.limit, rule.meters) for rule in limits.rules):
        # The count of a smooth quota comes and goes with each call.
        limited = ((counts[meter.counter], meter.maximum) for meter in meters if not meter.spacing)
        numbers = [(count, maximum) for count, maximum in limited if maximum is not None]
        if not limit.enforce or not numbers:
            continue
        share = limit.near_share or near
        nears = any(level(*number, share) is not Level.OK for number in numbers)
        repeats = isinstance(limit, RepeatLimit)
        if repeats and (limit.run_limit == 1 or not nears):
            # With `run_limit=1` the newest call is always at its limit: that is no news.
            continue
        is_near = is_near or nears
        count, maximum = min(numbers, key=lambda number: number[1] - number[0])
        remaining = max(0, maximum - count)
        if limit.unit == "nanodollars":
            part = f"money: {as_dollars(remaining)} of {as_dollars(maximum)} left"
        elif limit.unit == "milliseconds":
            part = f"time: {as_time(remaining)} of {as_time(maximum)} left"
        elif repeats:
            part = f"the same call or failure came {count} of {maximum} times"
        elif limit.kind == "model" and limit.unit == "calls":
            part = f"this is model call {count} of {maximum}"
        else:
            part = f"{_subject(limit)}: {remaining} of {maximum} left"
        asks = " (then a person is asked for more)" if limit.name in limits.asking else ""
        parts.append(part + asks)
    return f"Budget: {'; '.join(parts)}." if is_near else None


def _subject(limit: Limit) -> str:
    """Return what a limit counts, as a note says it."""
    if limit.kind == "model":
        return _SPENT[limit.counter]
    if limit.tools:
        return ", ".join(limit.tools)
    return f"all tools but {', '.join(limit.exclude)}" if limit.exclude else "all tools"


def _with_note(messages: Sequence[AnyMessage], note: str) -> list[AnyMessage]:
    """Return the messages with a note at the end of the newest one."""
    # The note changes with each request. At the end, it leaves the provider's prompt cache usable.
    # It is no system message: some providers refuse one in the middle of the list.
    if not messages or not _takes_note(messages[-1]):
        return [*messages, HumanMessage(note)]
    *older, newest = messages
    content: str | list[Block] = newest.content
    if not content:
        content = note
    elif isinstance(content, str):
        content = f"{content}\n\n{note}"
    else:
        content = [*content, {"type": "text", "text": note}]
    return [*older, newest.model_copy(update={"content": content})]


def _takes_note(message: AnyMessage) -> bool:
    """Return whether a text may be added to a message."""
    # It may not be added to the model's own messages, nor to an answer in a provider's own form.
    if not isinstance(message, ToolMessage):
        return isinstance(message, HumanMessage)
    parts = message.content if isinstance(message.content, list) else ()
    blocks = [part for part in parts if isinstance(part, dict)]
    kinds = [message.additional_kwargs.get("type"), *(block.get("type") for block in blocks)]
    return not any(kind in _OF_ONE_PROVIDER for kind in kinds)


def _without_exhausted(
    request: Request, limits: LimitSet, counts: Mapping[str, int]
) -> tuple[Request, str | None]:
    """Return the request without exhausted tools, and a note if they have to stay."""
    # A tool stays if each limit that refuses it lets calls wait, or asks a person: without a call
    # nobody would be asked.

    def is_left(tool: str) -> bool:
        (refused,) = admit([limits.plan_for(Call("tool", tool)).demand], counts, {}).refused
        refusing = [limits.by_name[name] for name in refused if name not in limits.asking]
        return not any(limit.enforce and getattr(limit, "wait", None) is None for limit in refusing)

    usable = [tool for tool in request.tools if isinstance(tool, dict) or is_left(tool.name)]
    return (request, None) if len(usable) == len(request.tools) else _offer(request, usable)


def _offer(request: Request, tools: list[Tool]) -> tuple[Request, str | None]:
    """Offer these tools, unless the provider might refuse the request."""
    # Some refuse an empty list of tools where the history has tool calls.
    has_history = any(
        isinstance(message, AIMessage) and message.tool_calls for message in request.messages
    )
    if not tools and has_history and not _has_structured_tool(request):
        return request.override(tool_choice=None), NO_TOOLS
    offered = {tool.name for tool in tools if not isinstance(tool, dict)}
    hidden = {tool.name for tool in request.tools if not isinstance(tool, dict)} - offered
    chosen: object = request.tool_choice
    if isinstance(chosen, dict):
        # OpenAI's or Anthropic's form.
        chosen = (chosen.get("function") or chosen).get("name")
    tool_choice = None if not tools or chosen in hidden else request.tool_choice
    return request.override(tools=tools, tool_choice=tool_choice), None


def _has_structured_tool(request: Request) -> bool:
    """Return whether LangChain is sure to add a tool for the structured response."""
    # With an automatic strategy it adds one unless it knows that the model has structured output.
    # It knows this from the model's profile or, without one, from the model's name.
    strategy = request.response_format
    if strategy is None or isinstance(strategy, ProviderStrategy):
        return False
    if isinstance(strategy, ToolStrategy):
        return True
    profile = request.model.profile
    if profile is not None:
        return not profile.get("structured_output")
    return not any(getattr(request.model, name, None) for name in ("model_name", "model"))

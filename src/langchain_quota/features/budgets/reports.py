"""The report of a provider about one model run."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from langchain_core.outputs import LLMResult

from langchain_quota.limits.call import ModelUsage

_TIERS = ("", "priority_", "flex_")
"""What langchain-openai writes in front of the names of details: OpenAI's service tiers."""

_MOST = 10**9
"""More tokens are no report, but nonsense."""


_PROVIDER_TOOLS = {
    "web_search_call": "web_search",
    "file_search_call": "file_search",
    "code_interpreter_call": "code_interpreter",
    "executable_code": "code_execution",
}
"""How OpenAI and Gemini name calls of their own tools; others name the tool beside the kind."""


def charged_tokens(usage: ModelUsage, counter: str) -> int:
    """Return the tokens that a budget is charged: none for an answer from LangChain's cache."""
    # Counters are named after the tokens that they count: `model.input_tokens`.
    return 0 if usage.cached else int(getattr(usage, counter.rpartition(".")[2]))


def reported_usage(result: LLMResult, requested: ModelUsage) -> ModelUsage:
    """Return a provider's report about one run; the caller estimates tokens that are missing."""
    # The first message has the usage; further ones repeat it.
    answer = next(iter(result.generations[0] if result.generations else ()), None)
    message = getattr(answer, "message", None)
    answered = {**(result.llm_output or {}), **getattr(message, "response_metadata", {})}
    usage: Mapping[str, Any] | None = getattr(message, "usage_metadata", None)
    if message is None and (own := answered.get("token_usage")) is not None:
        # Of a completion model; in a batch only the first run has it, for all.
        whole = {"input": "prompt", "output": "completion", "total": "total"}
        usage = {f"{ours}_tokens": own.get(f"{theirs}_tokens") for ours, theirs in whole.items()}
    about = _about(answered, requested)
    model = about["response_model"] or requested.request_model
    about["provider_tools"] = _provider_tools(message, answered.get("grounding_metadata"), model)
    if usage is None:
        return replace(requested, **about, estimated=True)
    # For an answer from its cache, LangChain sets the cost to zero, and leaves the tokens.
    cached = usage.get("total_cost") == 0
    tokens = counted(usage)
    if tokens is None:
        return replace(requested, **about, cached=cached, estimated=not cached)
    estimated = message is not None and not cached and not tokens["total_tokens"]
    return ModelUsage(
        request_model=requested.request_model, **about, **tokens, cached=cached, estimated=estimated
    )


def _about(answered: Mapping[str, Any], requested: ModelUsage) -> dict[str, Any]:
    """Return the names of the model that has answered."""
    raw = answered.get("usage")
    raw = raw if isinstance(raw, Mapping) else {}
    return {
        "provider": requested.provider or str(answered.get("model_provider") or ""),
        "response_model": str(answered.get("model_name") or answered.get("model") or ""),
        "service_tier": str(answered.get("service_tier") or raw.get("service_tier") or ""),
        "speed": str(raw.get("speed") or requested.speed),
    }


def _provider_tools(message: Any, sources: Any, model: str) -> tuple[str, ...]:
    """Return the provider's own tools that ran, by an answer's parts and by Gemini's sources."""
    parts = getattr(message, "content", None)
    tools = []
    for content in parts if isinstance(parts, list) else ():
        part: Mapping[str, object] = content if isinstance(content, Mapping) else {}
        is_named = part.get("type") in ("server_tool_use", "server_tool_call")
        name = part.get("name") if is_named else _PROVIDER_TOOLS.get(str(part.get("type")))
        done = part.get("action") or part.get("args")
        # OpenAI also opens pages, which costs nothing.
        opens = isinstance(done, Mapping) and done.get("type", "search") != "search"
        tools += [str(name)] if name and not opens else []
    metadata: Mapping[str, Any] = sources if isinstance(sources, Mapping) else {}
    queries = (metadata.get(f"{kind}_search_queries") or () for kind in ("web", "image"))
    searches = len({str(query) for of_kind in queries for query in of_kind if query})
    # Before Gemini 3, all searches of a call have one price.
    tools += ["web_search"] * (min(1, searches) if re.search("gemini-[12]", model) else searches)
    tools += ["google_maps"] * any(
        chunk.get("maps") for chunk in metadata.get("grounding_chunks") or ()
    )
    return tuple(sorted(tools))


def counted(usage: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the reported tokens; `None` if a number cannot be a count of tokens."""
    input_tokens = usage.get("input_tokens") or 0
    output_tokens = usage.get("output_tokens") or 0
    total = usage.get("total_tokens") or 0
    if not all(map(_is_count, (input_tokens, output_tokens, total))):
        return None
    inputs = usage.get("input_token_details") or {}
    outputs = usage.get("output_token_details") or {}
    # If Anthropic reports how long it keeps its cache, LangChain has 0 for the total.
    for_1h = _detail(inputs, "ephemeral_1h_input_tokens")
    split = for_1h + _detail(inputs, "ephemeral_5m_input_tokens")
    return {
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        # The higher number is safe if a report contradicts itself.
        "total_tokens": max(total, input_tokens + output_tokens),
        "cache_read_tokens": _detail(inputs, "cache_read"),
        "cache_creation_tokens": split or _detail(inputs, "cache_creation"),
        "cache_creation_1h_tokens": for_1h,
        "input_audio_tokens": _detail(inputs, "audio"),
        "output_audio_tokens": _detail(outputs, "audio"),
        "reasoning_tokens": _detail(outputs, "reasoning"),
    }


def _detail(details: Mapping[str, Any], name: str) -> int:
    """Return a detail, even if its name begins with a service tier; 0 without a count of tokens."""
    values = (details.get(tier + name) for tier in _TIERS) if details else ()
    return next((value for value in values if value and _is_count(value)), 0)


def _is_count(value: object) -> bool:
    """Return whether a value can be a count of tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST

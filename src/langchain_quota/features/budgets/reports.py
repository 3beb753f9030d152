"""What a provider reports of a model run, and what it may have served of one that failed."""

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from typing import Any

from langchain_core.outputs import LLMResult

from langchain_quota.limits.call import ModelUsage
from langchain_quota.runtime.units import parse_dollars

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
    raw = answered.get("usage")
    raw = raw if isinstance(raw, Mapping) else {}
    model = str(answered.get("model_name") or answered.get("model") or "")
    sources, name = answered.get("grounding_metadata"), model or requested.request_model
    about: dict[str, Any] = {
        "provider": requested.provider or str(answered.get("model_provider") or ""),
        "response_model": model,
        "service_tier": str(answered.get("service_tier") or raw.get("service_tier") or ""),
        "speed": str(raw.get("speed") or requested.speed),
        "provider_tools": _provider_tools(message, sources, name),
        "reported_cost": _reported_cost(answered),
    }
    if usage is None:
        return replace(requested, **about, estimated=True)
    # For an answer from its cache, LangChain sets the cost to zero, and leaves the tokens.
    cached = usage.get("total_cost") == 0
    tokens = counted(usage)
    if tokens is None:
        return replace(requested, **about, cached=cached, estimated=not cached)
    # Anthropic's sums leave out some iterations, such as compactions.
    sums: Counter[str] = Counter()
    iterations: Any = raw.get("iterations")
    names = ("input", "output", "cache_read_input", "cache_creation_input")
    for part in iterations if isinstance(iterations, list) else ():
        numbers = [_detail(part, f"{name}_tokens") for name in names]
        details = {"cache_read": numbers[2], "cache_creation": numbers[3]}
        details |= part.get("cache_creation") or {}
        report = {**part, "total_tokens": sum(numbers), "input_token_details": details}
        sums.update(counted(report) or {})
    tokens = {name: max(number, sums[name]) for name, number in tokens.items()}
    estimated = message is not None and not cached and not tokens["total_tokens"]
    return ModelUsage(
        request_model=requested.request_model, **about, **tokens, cached=cached, estimated=estimated
    )


def _reported_cost(answered: Mapping[str, Any]) -> Decimal | None:
    """Return the dollars that a provider says a run has cost; `None` without such a number."""
    usage, headers = (
        part if isinstance(part := answered.get(name), Mapping) else {}
        for name in ("token_usage", "headers")
    )
    # OpenRouter's, by its own class or by `ChatOpenAI`; then also LiteLLM's.
    cost = answered.get("cost", usage.get("cost"))
    with suppress(LookupError, TypeError, ValueError):
        if isinstance(cost, Mapping):  # Perplexity's
            cost = cost["total_cost"]
        elif "cost_in_usd_ticks" in usage:  # xAI's
            cost = usage["cost_in_usd_ticks"] / 10**10
        elif cost is None:  # LiteLLM's, with `include_response_headers=True`
            cost = float(headers["x-litellm-response-cost"])
        if not isinstance(cost, str):
            return parse_dollars("cost", cost)
    return None


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
    read, written = _detail(inputs, "cache_read"), split or _detail(inputs, "cache_creation")
    cached, reasoning = read + written, _detail(outputs, "reasoning")
    # Some providers count cached tokens beside the input, and reasoning beside the output. Then
    # only the total has them, or the part is larger than the whole.
    beside = max(0, total - input_tokens - output_tokens)
    is_beside = beside != reasoning and beside in (cached, cached + reasoning)
    if is_beside or cached > input_tokens:
        input_tokens += cached
    beside -= cached if is_beside else 0
    output_tokens += max(beside, reasoning if reasoning > output_tokens else 0)
    return {
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        # The higher number is safe if a report contradicts itself.
        "total_tokens": max(total, input_tokens + output_tokens),
        "cache_read_tokens": read,
        "cache_creation_tokens": written,
        "cache_creation_1h_tokens": for_1h,
        "input_audio_tokens": _detail(inputs, "audio"),
        "output_audio_tokens": _detail(outputs, "audio"),
        "reasoning_tokens": reasoning,
    }


def _detail(details: Mapping[str, Any], name: str) -> int:
    """Return a detail, even if its name begins with a service tier; 0 without a count of tokens."""
    values = (details.get(tier + name) for tier in _TIERS) if details else ()
    return next((value for value in values if value and _is_count(value)), 0)


def _is_count(value: object) -> bool:
    """Return whether a value can be a count of tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST


_REFUSED = range(400, 600)
"""The HTTP statuses of a request that was not served."""

_HAS_STATUS_AS_CODE = {"APIError", "GoogleAPICallError", "HTTPError"}
"""Errors whose `code` is an HTTP status: Google's and `urllib`'s. In other errors it is not."""

_CUT_OFF = (
    *("Timeout", "TimeoutError", "TimeoutException", "DeadlineExceeded"),
    *("ConnectionError", "ConnectionClosed", "ConnectionClosedError", "ProtocolError", "EOFError"),
    *("ReadError", "WriteError", "CloseError", "IncompleteRead", "IncompleteReadError"),
    *("ChunkedEncodingError", "PayloadError", "ResponseStreamingError"),
    *("JSONDecodeError", "ResponseValidationError", "FinishReasonError"),
    *("CancelledError", "GeneratorExit", "KeyboardInterrupt"),
)
"""The ends of the names of errors after which a provider may have served the request."""

_NOT_CONNECTED = {
    *("ConnectError", "ConnectTimeout", "ConnectTimeoutError", "ConnectionRefusedError"),
    *("ClientConnectorError", "EndpointConnectionError", "NewConnectionError", "PoolTimeout"),
    "gaierror",
}
"""Errors before anything is sent."""


def is_paid(error: BaseException) -> bool:
    """Return whether the provider may have served a request that has failed."""
    # Its causes, too. Errors that were handled earlier may be an SDK's first attempts.
    cause: BaseException | None = error
    all_names: set[str] = set()
    while cause is not None:
        names = {kind.__name__ for kind in type(cause).__mro__}
        holders = (cause, getattr(cause, "response", None))
        statuses = [getattr(holder, "status_code", None) for holder in holders]
        # Google's client gives the status 504 to a call for which it no longer waits.
        if names & _HAS_STATUS_AS_CODE and "DeadlineExceeded" not in names:
            statuses.append(getattr(cause, "code", None))
        if any(isinstance(status, int) and status in _REFUSED for status in statuses):
            return False
        all_names |= names
        cause = cause.__cause__
    if all_names & _NOT_CONNECTED:
        return False
    return any(name.endswith(_CUT_OFF) for name in all_names)

"""What one model run has used, read from what the provider reports."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from langchain_core.outputs import LLMResult

TokenKind = Literal["total", "input", "output"]

_TIERS = ("priority", "flex")
"""OpenAI's service tiers that langchain-openai writes in front of the names of details."""

_NAMES = {
    name: (name, *(f"{tier}_{name}" for tier in _TIERS))
    for name in ("cache_read", "cache_creation", "audio", "reasoning")
}
"""The names of details."""

_MOST = 10**9
"""More tokens are no report, but nonsense."""


@dataclass(frozen=True, kw_only=True)
class ModelUsage:
    """The tokens of one model run, and what their price depends on.

    The details are parts of `input_tokens` and `output_tokens`, as in LangChain's
    `usage_metadata`: they are not added to them.

    Attributes:
        provider: Who serves the model, as LangChain names it in `ls_provider`; empty if unknown.
        request_model: The model that was asked for; with Azure perhaps a deployment.
        response_model: The model that the provider says has answered, mostly with a date.
        service_tier: The tier that the provider says it has served, such as `"priority"` or
            `"flex"`; empty if it does not say.
        speed: Anthropic's `"fast"` or `"standard"`; empty if it does not say.
        input_tokens: All tokens of the prompt, cached ones among them.
        output_tokens: All tokens of the answer, reasoning among them.
        total_tokens: Both, as the provider adds them; at least their sum.
        cache_read_tokens: Of the input, those that the provider read from its cache.
        cache_creation_tokens: Of the input, those that it wrote to its cache.
        cache_creation_1h_tokens: Of those, the ones that it keeps for an hour: they cost more.
        input_audio_tokens: Of the input, those of sounds.
        output_audio_tokens: Of the output, those of sounds.
        reasoning_tokens: Of the output, those of reasoning.
        cached: Whether LangChain's own response cache has answered: nothing is to be paid.
        estimated: Whether the numbers are estimates, since the provider has reported none.

    Examples:
        A price of your own, for `QuotaMiddleware(…, prices=a_dollar_per_million)`:

        >>> from decimal import Decimal
        >>> from langchain_quota import ModelUsage
        >>> def a_dollar_per_million(usage: ModelUsage) -> Decimal:
        ...     return Decimal(usage.total_tokens) / 1_000_000
        >>> usage = ModelUsage(response_model="mine", input_tokens=900, total_tokens=1000)
        >>> a_dollar_per_million(usage)
        Decimal('0.001')
        >>> usage.models
        ('mine',)
    """

    provider: str = ""
    request_model: str = ""
    response_model: str = ""
    service_tier: str = ""
    speed: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    cache_read_tokens: int = 0
    cache_creation_tokens: int = 0
    cache_creation_1h_tokens: int = 0
    input_audio_tokens: int = 0
    output_audio_tokens: int = 0
    reasoning_tokens: int = 0
    cached: bool = False
    estimated: bool = False

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the model, the most exact one first."""
        names = (self.response_model, self.request_model)
        return tuple(name for name in dict.fromkeys(names) if name)


def charged_tokens(usage: ModelUsage, counter: str) -> int:
    """How many tokens a budget is charged: none for an answer from LangChain's response cache."""
    # Counters are named after the tokens that they count: `model.input_tokens`.
    return 0 if usage.cached else int(getattr(usage, counter.rpartition(".")[2]))


def reported_usage(result: LLMResult, asked: ModelUsage) -> ModelUsage:
    """What a provider reports about one run; without tokens in it, the caller estimates them."""
    # The first message has the usage; further ones repeat it.
    answer = next(iter(result.generations[0] if result.generations else ()), None)
    message = getattr(answer, "message", None)
    answered = {**(result.llm_output or {}), **getattr(message, "response_metadata", {})}
    usage: Mapping[str, Any] | None = getattr(message, "usage_metadata", None)
    if message is None:
        usage = _of_completion(answered.get("token_usage"))
    about = _about(answered, asked)
    if usage is None:
        return replace(asked, **about, estimated=True)
    # For an answer from its cache, LangChain sets the cost to zero, and leaves the tokens.
    cached = usage.get("total_cost") == 0
    tokens = counted(usage)
    if tokens is None:
        return replace(asked, **about, cached=cached, estimated=not cached)
    estimated = message is not None and not cached and not tokens["total_tokens"]
    return ModelUsage(
        request_model=asked.request_model, **about, **tokens, cached=cached, estimated=estimated
    )


def _of_completion(usage: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The usage of a completion model's run; in a batch only the first run has it, for all."""
    if usage is None:
        return None
    return {
        "input_tokens": usage.get("prompt_tokens"),
        "output_tokens": usage.get("completion_tokens"),
        "total_tokens": usage.get("total_tokens"),
    }


def _about(answered: Mapping[str, Any], asked: ModelUsage) -> dict[str, Any]:
    """The names of the model that has answered."""
    raw = answered.get("usage")
    raw = raw if isinstance(raw, Mapping) else {}
    return {
        "provider": asked.provider or str(answered.get("model_provider") or ""),
        "response_model": str(answered.get("model_name") or answered.get("model") or ""),
        "service_tier": str(answered.get("service_tier") or raw.get("service_tier") or ""),
        "speed": str(raw.get("speed") or asked.speed),
    }


def counted(usage: Mapping[str, Any]) -> dict[str, Any] | None:
    """The reported tokens; `None` if a number cannot be one of tokens."""
    given = usage.get("input_tokens") or 0
    made = usage.get("output_tokens") or 0
    total = usage.get("total_tokens") or 0
    if not all(map(_is_count, (given, made, total))):
        return None
    inputs = usage.get("input_token_details") or {}
    outputs = usage.get("output_token_details") or {}
    # If Anthropic reports how long it keeps its cache, LangChain has 0 for the total.
    for_1h = _detail(inputs, "ephemeral_1h_input_tokens")
    split = for_1h + _detail(inputs, "ephemeral_5m_input_tokens")
    return {
        "input_tokens": given,
        "output_tokens": made,
        # The higher number is safe if a report contradicts itself.
        "total_tokens": max(total, given + made),
        "cache_read_tokens": _detail(inputs, "cache_read"),
        "cache_creation_tokens": split or _detail(inputs, "cache_creation"),
        "cache_creation_1h_tokens": for_1h,
        "input_audio_tokens": _detail(inputs, "audio"),
        "output_audio_tokens": _detail(outputs, "audio"),
        "reasoning_tokens": _detail(outputs, "reasoning"),
    }


def _detail(details: Mapping[str, Any], name: str) -> int:
    """A detail, also if its name begins with a service tier; 0 without a number of tokens."""
    if not details:
        return 0
    found = (details.get(each) for each in _NAMES.get(name, (name,)))
    return next((each for each in found if each and _is_count(each)), 0)


def _is_count(value: object) -> bool:
    """Whether something can be a number of tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST

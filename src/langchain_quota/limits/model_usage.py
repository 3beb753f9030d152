"""The tokens that one model run has used."""

from dataclasses import dataclass
from typing import Literal

TokenKind = Literal["total", "input", "output"]


@dataclass(frozen=True, kw_only=True)
class ModelUsage:
    """The tokens of one model run, and all that their price depends on.

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
        provider_tools: The provider's own tools that have run, such as `"web_search"`, each once
            for every call. Anthropic, Google and OpenAI name them in the answer.
        cached: Whether LangChain's own response cache has answered: nothing is to be paid.
        estimated: Whether the numbers are estimates, since the provider has reported none.

    Examples:
        A price of your own, for `QuotaMiddleware(…, prices=a_dollar_per_million)`:

        >>> from decimal import Decimal
        >>> from langchain_quota.limits.model_usage import ModelUsage
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
    provider_tools: tuple[str, ...] = ()
    cached: bool = False
    estimated: bool = False

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the model, the most exact one first."""
        names = (self.response_model, self.request_model)
        return tuple(name for name in dict.fromkeys(names) if name)

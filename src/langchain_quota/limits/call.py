"""The call that a limit checks, the scopes of counts, and what a model call has used."""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, NamedTuple, TypeAlias

Kind = Literal["model", "tool"]

Scope = str
"""The scope of a count: `"thread"`, `"run"`, or the name of a quota."""

THREAD: Scope = "thread"
RUN: Scope = "run"

ROOT_RUN: Scope = "root_run"
"""A run that no other run encloses, with everything that it starts."""

STORE: Scope = "store"
"""In place of a scope, if a limit refuses because the store is unavailable."""

FROZEN: Scope = "frozen"
"""In place of a scope in metrics, spans and messages, if the subject of a limit is frozen."""

CALL: Scope = "call"
"""One request, which is as large as it is, whatever was used before."""

CONCURRENCY: Scope = "concurrency"
"""The scope of calls that run at the same time. Their count includes the blocked call."""

RESERVED: tuple[Scope, ...] = (RUN, STORE, CONCURRENCY, FROZEN, "none")
"""What no quota can be named: it would look like these in metrics, spans and messages."""

FromContext: TypeAlias = Callable[[Any, Any], object]
"""A user's function of the agent's state and runtime, sync or async."""

Exit = Literal["continue", "error", "end", "finalize", "ask"]

TokenKind = Literal["total", "input", "output", "uncached"]


class Call(NamedTuple):
    """A call that limits check.

    Attributes:
        kind: `"model"` or `"tool"`.
        tool: The tool's name as the model gave it; `None` for a model call.
        id: The tool call's id; `None` for a model call.
        amount: How many calls it counts as: 1 for a call that is checked, perhaps more in a
            `Refund`.
        agent: The name of the agent that makes the call, if it has one.
        thread_id: The thread's id as the caller gave it. `None` if there is no thread. Also `None`
            if the agent runs inside another agent, and its use cannot be told from the other's.

    Examples:
        >>> from langchain_quota import ToolCallLimit
        >>> from langchain_quota.limits.call import Call
        >>> call = Call("tool", "search", id="call_1", agent="researcher", thread_id="7")
        >>> ToolCallLimit("search", run_limit=3).matches(call)
        True
    """

    kind: Kind
    tool: str | None = None
    id: str | None = None
    amount: int = 1
    agent: str | None = None
    thread_id: object = None


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
        estimated: Whether numbers are estimates, since the provider has reported none, or too few.
        reported_cost: What the provider says that the run has cost, in US dollars; `None` if it
            says nothing.

    Examples:
        A price of your own, for `QuotaMiddleware(…, prices=a_dollar_per_million)`:

        >>> from decimal import Decimal
        >>> from langchain_quota.limits.call import ModelUsage
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
    reported_cost: Decimal | None = None

    def __post_init__(self) -> None:
        # A reserve of input and output alone would reserve no tokens.
        known = self.input_tokens + self.output_tokens
        if self.total_tokens < known:
            object.__setattr__(self, "total_tokens", known)

    @property
    def uncached_tokens(self) -> int:
        """All tokens except those that the provider read from its cache."""
        return max(0, self.total_tokens - self.cache_read_tokens)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the model, the most exact one first."""
        names = (self.response_model, self.request_model)
        return tuple(name for name in dict.fromkeys(names) if name)

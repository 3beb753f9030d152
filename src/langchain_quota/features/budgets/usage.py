"""What model runs may use: a bound before a run, and an estimate where nothing is reported."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from langchain.agents.structured_output import ToolStrategy
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, BaseMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

from langchain_quota.features.budgets.reports import counted
from langchain_quota.limits.call import ModelUsage
from langchain_quota.middleware.feature import Request
from langchain_quota.runtime import compat

DEFAULT_MAX_TOKENS = 16_384
"""The bound of an answer where the request, the model and its profile have none."""

MOST_PER_MEDIUM = 50_000
"""The bound of a medium that is no text. No known model takes more for an image."""

_MOST_PER_MESSAGE = 10
"""The most tokens that a chat template puts around a message."""

_MOST_FOR_TOOLS = 1_000
"""The most tokens that a provider adds to a prompt with tools, beside the tools themselves."""

_MOST_BYTES = 8
"""More bytes of text than a token has on average."""

_BYTES = 3
"""How many bytes of text a token is taken for in an estimate."""

_MOST_FOR_ONE = 1_000
"""More bytes than one token has, also with all that a message has around it."""

_PER_MEDIUM = 1_000
"""How many tokens a medium is taken for in an estimate."""

_SAID = ("text", "thinking", "reasoning", "summary")
"""Where a block of a message has its text."""

_TEXTS = {"text", "input_text", "output_text"}
_MEDIA = {
    *("image", "image_url", "input_image"),
    *("audio", "document", "file", "input_audio", "input_file", "media", "video"),
}
_CALLS = {"tool_use", "tool_call", "function_call"}
_MAX_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict")
_THINKING = ("thinking", "thinking_budget", "thinking_level", "reasoning", "reasoning_effort")


def max_usage(request: Request) -> ModelUsage:
    """Return the most tokens that a model call can use, as far as this is known before the call.

    The input: the tokens that the provider has reported for the call of the newest answer, and one
    token for each byte in UTF-8 of all newer messages; no tokenizer makes more. Without a report,
    or with an impossible one, the bytes of the whole request. The output is the longest answer:
    `max_tokens` of the request's settings or of the model, else that of the model's profile, else
    16,384 tokens. docs/budgets.md says when a call can use more.

    Args:
        request: The request, as `wrap_model_call` has it.

    Examples:
        >>> from langchain_quota import TokenLimit, max_usage
        >>> limit = TokenLimit(run_limit=100_000, reserve=max_usage)
    """
    usage = asked_of(request.model, request.model_settings)
    settings = _settings(request.model, request.model_settings)

    def setting(name: str) -> Any:
        return next((setting[name] for setting in settings if setting.get(name) is not None), None)

    reported, sent = _newest_report(request.messages, usage.provider)
    tools: list[Any] = []
    input_tokens = reported
    if not reported:
        sent, tools = _sent(request)
        input_tokens = _MOST_FOR_TOOLS if tools else 0
    size, media = _size(sent, tools)
    input_tokens += size + sum(max(MOST_PER_MEDIUM, medium) for medium in media)
    input_tokens += _MOST_PER_MESSAGE * (len(sent) + 1)
    output_tokens = _max_tokens(request.model, request.model_settings) * (setting("n") or 1)
    return replace(
        usage,
        service_tier=str(setting("service_tier") or ""),
        speed=str(setting("speed") or ""),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        total_tokens=input_tokens + output_tokens,
        estimated=True,
    )


def _sent(request: Request) -> tuple[Sequence[AnyMessage], list[Any]]:
    """Return all messages of a request, and its tools as a provider gets them."""
    sent = [*([request.system_message] if request.system_message else []), *request.messages]
    tools = [t if isinstance(t, dict) else convert_to_openai_tool(t) for t in request.tools]
    form: Any = request.response_format
    if form is not None:
        specs = ToolStrategy(getattr(form, "schema", form)).schema_specs
        tools += [spec.json_schema for spec in specs]
    return sent, tools


def estimated_size(request: Request) -> int:
    """Estimate the tokens of a request's prompt."""
    return max(1, estimated_tokens(*_sent(request)))


def asked_of(model: BaseChatModel, settings: Mapping[str, Any]) -> ModelUsage:
    """Return a model's name and provider before the call: settings may name another model."""
    return asked_in(compat.model_parameters(model, settings))


def asked_in(metadata: Mapping[str, Any] | None, *, speed: str = "") -> ModelUsage:
    """Return the same from the metadata that LangChain gives to callbacks."""
    values = metadata or {}
    provider, model = values.get("ls_provider") or "", values.get("ls_model_name") or ""
    return ModelUsage(provider=str(provider), request_model=str(model), speed=speed)


def estimated_tokens(messages: Iterable[BaseMessage], tools: object = None) -> int:
    """Estimate the tokens of messages of which the provider reports nothing."""
    # Some providers' reasoning is beside the content. Reasoning that is not shown is missing.
    messages = [*messages]
    beside = [message.additional_kwargs.get("reasoning_content") for message in messages]
    size, media = _size([*messages, *(AIMessage(str(text)) for text in beside if text)], tools)
    return -(-size // _BYTES) + _PER_MEDIUM * len(media)


def likely_tokens(
    reported: int, messages: Iterable[BaseMessage], tools: object = None, *, is_report: bool
) -> int:
    """Return the reported tokens of messages, or an estimate if there must be more."""
    # Some providers report 0, or 1 as a placeholder.
    if is_report and reported > 1:
        return reported
    estimate = estimated_tokens(messages, tools)
    is_possible = is_report and estimate * _BYTES <= _MOST_FOR_ONE
    return reported if is_possible else max(reported, estimate)


def _size(messages: Iterable[BaseMessage], tools: object = None) -> tuple[int, list[int]]:
    """Return the bytes of text in messages or their parts, and the bytes of each medium."""
    texts = [as_json(tools)] if tools else []
    media: list[int] = []
    for message in messages:
        # Of an answer that is streamed: its calls may be unfinished.
        is_part = isinstance(message, AIMessageChunk)
        content = message.content
        blocks = [content] if isinstance(content, str) else content
        kinds = {block.get("type") for block in blocks if isinstance(block, Mapping)}
        for block in blocks:
            if isinstance(block, str):
                texts.append(block)
            elif block.get("type") in _MEDIA:
                media.append(len(as_json(block)))
            elif is_part or block.get("type") in _TEXTS:
                texts.append(next((str(block[key]) for key in _SAID if block.get(key)), ""))
            else:
                texts.append(as_json(block))
        if isinstance(message, AIMessageChunk):
            parts = message.tool_call_chunks
            texts += [part.get("args") or part.get("name") or "" for part in parts]
        elif kinds.isdisjoint(_CALLS):
            texts += map(as_json, getattr(message, "tool_calls", None) or ())
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts), media


def as_json(value: object) -> str:
    """Return about what is sent to a provider."""
    return json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)


def _newest_report(
    messages: Sequence[AnyMessage], provider: str
) -> tuple[int, Sequence[AnyMessage]]:
    """Return the tokens of the newest call that this provider reported, and all newer messages."""
    for index in reversed(range(len(messages))):
        message = messages[index]
        if not isinstance(message, AIMessage) or not message.usage_metadata:
            continue
        by = message.response_metadata.get("model_provider") or provider
        # Azure's answers say "openai".
        if by == provider or {by, provider} == {"azure", "openai"}:
            total = (counted(message.usage_metadata) or {}).get("total_tokens", 0)
            # Whether a call may have used so few tokens for the messages up to there.
            if total >= max(index + 1, _size(messages[: index + 1])[0] / _MOST_BYTES):
                return total, messages[index + 1 :]
        break
    return 0, messages


def _settings(model: BaseChatModel, settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Yield where a call's settings may be, the winning ones first: the body is sent as it is."""
    attributes = {
        name: getattr(model, name, None)
        for name in ("n", "service_tier", "speed", *_MAX_TOKENS, *_THINKING)
    }
    body = settings.get("extra_body", getattr(model, "extra_body", None))
    return [body or {}, settings, attributes, getattr(model, "model_kwargs", None) or {}]


def _max_tokens(model: BaseChatModel, settings: Mapping[str, Any]) -> int:
    """Return the limit of an answer; the higher of two, if it is not known which one holds."""
    body, *rest = _settings(model, settings)
    wins = _limits([settings], [_setting_of(model)])
    profile: Mapping[str, Any] = model.profile or {}
    default: int = profile.get("max_output_tokens") or DEFAULT_MAX_TOKENS
    limits = [*_limits([body], _MAX_TOKENS), *(wins or _limits(rest, _MAX_TOKENS))]
    return max(limits, default=default)


def _setting_of(model: BaseChatModel) -> str:
    """Return the setting that limits the answer of one call."""
    fields = type(model).model_fields
    # With ChatOpenAI's Responses API the model's own limit wins over `max_tokens`.
    alias = fields["max_tokens"].alias if "max_tokens" in fields else None
    own = [alias] if alias in _MAX_TOKENS else [name for name in _MAX_TOKENS if name in fields]
    return str((own or ["max_tokens"])[0])


def shortened(request: Request, longest: int, tokens: int) -> Request | None:
    """Return a request for an answer of so many tokens; `None` if that is not to be changed."""
    model, settings, setting = request.model, request.model_settings, _setting_of(request.model)
    if request.response_format is not None or setting == "num_predict":
        # A part of a structured response is of no use, and Ollama takes no setting of a call.
        return None
    if any(one.get(name) for one in _settings(model, settings) for name in _THINKING):
        return None
    shorter = {**settings, setting: tokens}
    # Nor is one with several answers, or with a limit of its body.
    is_known = (_max_tokens(model, settings), _max_tokens(model, shorter)) == (longest, tokens)
    return request.override(model_settings=shorter) if is_known else None


def _limits(settings: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[int]:
    """Yield the limits of an answer that settings have."""
    values = [setting.get(name) for setting in settings for name in names]
    return [value for value in values if isinstance(value, int) and value > 0]

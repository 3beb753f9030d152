"""Collects the model runs that a block starts, at any depth, and what each of them has used."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from typing import Any, Literal, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.tracers.context import register_configure_hook

from langchain_quota.features.budgets.estimates import asked_in, estimated_usage
from langchain_quota.features.budgets.model_errors import http_status, is_cut_off
from langchain_quota.middleware.context import DECISION
from langchain_quota.model_usage import ModelUsage, reported_usage

logger = logging.getLogger("langchain_quota")

Status = Literal["success", "error", "pending"]

_SAID = ("text", "thinking", "reasoning", "summary")
"""Where a block of an answer has its text."""


@dataclass(frozen=True, kw_only=True)
class ModelRun:
    """A model run, which is one call of a model, without the retries of the provider's own SDK."""

    id: str
    status: Status
    usage: ModelUsage
    error: str = ""
    http_status: int | None = None
    shared: bool = False


@dataclass(kw_only=True)
class _Started:
    """A run that has not ended."""

    asked: ModelUsage
    prompt: Sequence[BaseMessage]
    params: Mapping[str, Any]
    chunks: list[AIMessageChunk] = field(default_factory=list)

    def used(self, result: LLMResult, answer: BaseMessage) -> ModelUsage:
        """What the provider reports, or an estimate."""
        usage = reported_usage(result, self.asked)
        if usage.estimated:
            return estimated_usage(usage, self.prompt, [answer], tools=self.params.get("tools"))
        if usage.cache_creation_tokens and not usage.cache_creation_1h_tokens and self._keeps_1h():
            return replace(usage, cache_creation_1h_tokens=usage.cache_creation_tokens)
        return usage

    def used_so_far(self) -> ModelUsage:
        """The same for a run that has not ended or was cut off: its report may be incomplete."""
        whole = _joined(self.chunks)
        used = self.used(LLMResult(generations=[[ChatGeneration(message=whole)]]), whole)
        return replace(used, estimated=True)

    def _keeps_1h(self) -> bool:
        """Whether the request asks Anthropic to keep its cache for an hour, which costs more."""
        # A streamed answer does not say how long the cache is kept.
        sent = (self.params, *(message.content for message in self.prompt))
        return any(_keeps_1h(each) for each in sent)


Admit = Callable[[ModelUsage], None]
"""Raises an exception if a model may not be called. Its argument names the model; no tokens."""


def _raises_nothing(noting: Callable[..., None]) -> Callable[..., None]:
    """Log exceptions of a callback: raised, they would end the call of the model."""

    @wraps(noting)
    def noted(*args: Any, **more: Any) -> None:
        try:
            noting(*args, **more)
        except Exception:
            logger.warning("a model run was not understood", exc_info=True)

    return noted


class ModelRunCollector(BaseCallbackHandler):
    """Collects model runs by their ids, from callbacks of any thread."""

    run_inline = True
    ignore_agent = ignore_retriever = ignore_retry = ignore_custom_event = True

    def __init__(
        self, admit: Admit | None = None, around: "ModelRunCollector | None" = None
    ) -> None:
        self._runs: dict[UUID, _Started | ModelRun] = {}
        self._admit = admit
        self._around = around
        # With this, an exception in `on_chat_model_start` ends the call before it is made.
        self.raise_error = admit is not None
        self.refused: list[UUID] = []
        """The model runs that were refused: their ends are not noted."""
        self.shares = False
        """Whether an outer or inner collector may have some of the same runs."""

    def runs(self) -> list[ModelRun]:
        """The model runs so far, in the order in which they have started."""
        # A run that is pending may end later; then another object has the same id.
        found = [_as_run(run_id, each) for run_id, each in [*self._runs.items()]]
        return [replace(each, shared=True) for each in found] if self.shares else found

    def __contains__(self, run_id: str) -> bool:
        """Whether a model run has started here."""
        return UUID(run_id) in self._runs

    def pop(self, run_id: UUID) -> ModelRun | None:
        """Remove a model run and return it; `None` if it is not known."""
        found = self._runs.pop(run_id, None)
        return None if found is None else _as_run(run_id, found)

    def on_chat_model_start(
        self,
        serialized: Mapping[str, Any] | None,  # noqa: ARG002 - by position
        messages: Sequence[Sequence[BaseMessage]],
        *,
        run_id: UUID,
        metadata: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Keep what was asked."""
        self._refuse(run_id, metadata, more)
        prompt = [message for each in messages for message in each]
        self._start(run_id, prompt, metadata, more)

    def on_llm_start(
        self,
        serialized: Mapping[str, Any] | None,  # noqa: ARG002 - by position
        prompts: Sequence[str],
        *,
        run_id: UUID,
        metadata: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Keep what was asked of a completion model."""
        self._refuse(run_id, metadata, more)
        self._start(run_id, [*map(HumanMessage, prompts)], metadata, more)

    @_raises_nothing
    def on_llm_new_token(self, token: Any, *, run_id: UUID, chunk: Any = None, **_: object) -> None:
        """Keep what has arrived."""
        started = self._runs.get(run_id)
        if isinstance(started, _Started):
            message = getattr(chunk, "message", None)
            if not isinstance(message, AIMessageChunk):
                message = AIMessageChunk(content=token or "")
            started.chunks.append(message)

    @_raises_nothing
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: object) -> None:
        """Note what has been used."""
        started = self._runs.get(run_id)
        if isinstance(started, _Started):
            answers = response.generations[0] if response.generations else []
            answer = answers[0] if answers else None
            message = getattr(answer, "message", None) or AIMessage(answer.text if answer else "")
            self._end(run_id, status="success", usage=started.used(response, message))

    @_raises_nothing
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: object) -> None:
        """Note what may have been used."""
        started = self._runs.get(run_id)
        if isinstance(started, _Started):
            status = http_status(error)
            paid = started.chunks or (status is None and is_cut_off(error))
            usage = started.used_so_far() if paid else started.asked
            name = type(error).__name__
            self._end(run_id, status="error", usage=usage, error=name, http_status=status)

    def on_chain_start(
        self,
        serialized: Mapping[str, Any] | None,  # noqa: ARG002 - by position
        inputs: object,
        *,
        run_id: UUID,
        run_type: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Keep what was asked of a decision model: for callbacks it is a chain of this type."""
        if run_type == DECISION:
            self._refuse(run_id, metadata, more)
            self._start(run_id, [HumanMessage(str(inputs))], metadata, more)

    def on_chain_end(self, outputs: object, *, run_id: UUID, **_: object) -> None:
        """Note what a decision model has used."""
        if run_id in self._runs:
            message = AIMessage(
                str(getattr(outputs, "answers", "")),
                usage_metadata=getattr(outputs, "usage", None),
                response_metadata={"model_name": getattr(outputs, "model", "")},
            )
            generation = ChatGeneration(message=message)
            self.on_llm_end(LLMResult(generations=[[generation]]), run_id=run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: object) -> None:
        """Note what a decision model may have used."""
        if run_id in self._runs:
            self.on_llm_error(error, run_id=run_id)

    def _refuse(
        self, run_id: UUID, metadata: Mapping[str, Any] | None, more: Mapping[str, Any]
    ) -> None:
        """Raise an exception if the model may not be called."""
        if self._admit is None:
            return
        try:
            self._admit(_asked_in(metadata, more))
        except Exception:
            self.refused.append(run_id)
            around = self._around
            while around is not None:
                # The outer collector saw the run first.
                around._runs.pop(run_id, None)  # noqa: SLF001 - of the same class
                around = around._around  # noqa: SLF001
            raise

    @_raises_nothing
    def _start(
        self,
        run_id: UUID,
        prompt: Sequence[BaseMessage],
        metadata: Mapping[str, Any] | None,
        more: Mapping[str, Any],
    ) -> None:
        params = more.get("invocation_params") or {}
        asked = _asked_in(metadata, more)
        # A decision model that asks another model is not charged beside that one.
        self._runs.pop(cast("UUID", more.get("parent_run_id")), None)
        self._runs[run_id] = _Started(asked=asked, prompt=prompt, params=params)

    def _end(self, run_id: UUID, **run: Any) -> None:
        self._runs[run_id] = ModelRun(id=str(run_id), **run)


_collector: ContextVar[ModelRunCollector | None] = ContextVar("model_run_collector", default=None)


@contextmanager
def collect_model_runs(admit: Admit | None = None) -> Iterator[ModelRunCollector]:
    """Collect the model runs that the block starts, also those in sub-agents, tools and threads."""
    # Blocks may be nested: each one collects all of its runs. A run that ends after its block is
    # collected, too.
    _register()
    around = _collector.get()
    collector = ModelRunCollector(admit, around)
    if around is not None:
        around.shares = collector.shares = True
    token = _collector.set(collector)
    try:
        yield collector
    finally:
        # A coroutine that outlives its event loop is closed in another context.
        with suppress(ValueError):
            _collector.reset(token)


@cache
def _register() -> None:
    """Have LangChain look for a collector, from the first one on."""
    register_configure_hook(_collector, inheritable=True)


def _asked_in(metadata: Mapping[str, Any] | None, more: Mapping[str, Any]) -> ModelUsage:
    """The model and its provider, from what LangChain gives to callbacks."""
    params = more.get("invocation_params") or {}
    return asked_in(metadata, speed=str(params.get("speed") or ""))


def _joined(chunks: Sequence[AIMessageChunk]) -> AIMessage:
    """What has arrived, as one answer; the arguments of calls are text."""
    # LangChain would parse them. For an unfinished call that takes quadratic time.
    texts: list[str] = []
    metadata: dict[str, Any] = {}
    usage: UsageMetadata | None = None
    for each in chunks:
        # Anthropic's arguments are blocks of the content, too.
        texts += [part.get("args") or part.get("name") or "" for part in each.tool_call_chunks]
        parts = [each.content] if isinstance(each.content, str) else each.content
        texts += [part if isinstance(part, str) else _said(part) for part in parts]
        metadata |= each.response_metadata
        if each.usage_metadata:
            usage = add_usage(usage, each.usage_metadata)
    return AIMessage("".join(texts), usage_metadata=usage, response_metadata=metadata)


def _said(part: Mapping[str, Any]) -> str:
    """The text of a block of an answer, from any provider."""
    return next((str(part[key]) for key in _SAID if part.get(key)), "")


def _as_run(run_id: UUID, known: _Started | ModelRun) -> ModelRun:
    if isinstance(known, ModelRun):
        return known
    return ModelRun(id=str(run_id), status="pending", usage=known.used_so_far())


def _keeps_1h(sent: object) -> bool:
    if isinstance(sent, Mapping):
        return sent.get("ttl") == "1h" or any(map(_keeps_1h, sent.values()))
    return isinstance(sent, list | tuple) and any(map(_keeps_1h, sent))

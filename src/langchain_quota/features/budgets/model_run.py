"""One run of a model: what is asked, what has arrived, and what it has used."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.outputs import ChatGeneration, LLMResult

from langchain_quota.features.budgets.reports import reported_usage
from langchain_quota.features.budgets.usage import as_json, estimated_tokens, likely_tokens
from langchain_quota.limits.call import ModelUsage


@dataclass(kw_only=True, eq=False)
class ModelRun:
    """A model run, which is one call of a model, without the retries of the provider's own SDK."""

    id: str
    # The name of the agent that makes it.
    agent: str
    # What is asked, until it has ended.
    usage: ModelUsage
    prompt: Sequence[BaseMessage]
    params: Mapping[str, Any]
    # Whether several agents may be charged for it.
    shared: bool
    task: "asyncio.Task[Any] | None"
    kept_in: "Sequence[Runs]"
    chunks: list[AIMessageChunk] = field(default_factory=list)
    has_ended: bool = False
    succeeded: bool = False

    def end(self, usage: ModelUsage, *, succeeded: bool = False) -> None:
        """Note what it has used."""
        self.usage, self.succeeded, self.has_ended = usage, succeeded, True
        self.prompt, self.params, self.chunks = (), {}, []

    def now(self) -> "ModelRun":
        """Return what is to be charged now: an estimate, if the run has not ended."""
        return self if self.has_ended else replace(self, usage=self.used_so_far())

    def used(
        self, result: LLMResult, answer: Sequence[BaseMessage], *, is_whole: bool = True
    ) -> ModelUsage:
        """Return what the provider reports, or an estimate of what it cannot have reported."""
        usage = reported_usage(result, self.usage)
        if usage.cached or not (usage.estimated or usage.total_tokens):
            return usage
        tools, is_report = self.params.get("tools"), not usage.estimated
        inputs = likely_tokens(usage.input_tokens, self.prompt, tools, is_report=is_report)
        outputs = likely_tokens(usage.output_tokens, answer, is_report=is_report and is_whole)
        # Of a stream, no report counts the prompts that Anthropic compacted.
        summaries = [
            HumanMessage(str(block.get("content")))
            for message in answer
            if isinstance(message.content, list) and "usage" not in message.response_metadata
            for block in message.content
            if isinstance(block, dict) and block.get("type") == "compaction"
        ]
        inputs += sum(estimated_tokens(self.prompt, tools) for _ in summaries)
        outputs += estimated_tokens(summaries)
        if inputs > usage.input_tokens or outputs > usage.output_tokens:
            total = max(usage.total_tokens, inputs + outputs)
            sums: Any = {"input_tokens": inputs, "output_tokens": outputs, "total_tokens": total}
            usage = replace(usage, **sums, estimated=True)
        if usage.cache_creation_tokens and not usage.cache_creation_1h_tokens:
            # A streamed answer of Anthropic does not say how long its cache is kept; an hour costs
            # more. In a text, the quotes would be escaped.
            sent = as_json([self.params, *(message.content for message in self.prompt)])
            if '"ttl": "1h"' in sent:
                return replace(usage, cache_creation_1h_tokens=usage.cache_creation_tokens)
        return usage

    def used_so_far(self) -> ModelUsage:
        """Return the use of a run that was cut off or goes on: its report may be incomplete."""
        # LangChain's sum of chunks takes quadratic time for an unfinished call. So only what is
        # told beside the texts is joined.
        usage: UsageMetadata | None = None
        metadata: dict[str, Any] = {}
        for chunk in self.chunks:
            metadata |= chunk.response_metadata
            if chunk.usage_metadata:
                usage = add_usage(usage, chunk.usage_metadata)
        message = AIMessage("", usage_metadata=usage, response_metadata=metadata)
        result = LLMResult(generations=[[ChatGeneration(message=message)]])
        return replace(self.used(result, self.chunks, is_whole=False), estimated=True)


# Threads change them, each by single operations.
Runs = dict[UUID, ModelRun]

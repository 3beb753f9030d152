"""The answer of a model call with what is written to the state, and the call with what is held."""

from collections.abc import Mapping
from typing import Any

from langchain.agents.middleware.types import (
    ExtendedModelResponse,
    ModelResponse,
)
from langgraph.types import Command

from langchain_quota.middleware._calls import Update
from langchain_quota.state import ledger


class ChargedResponse(ModelResponse[Any], ExtendedModelResponse[Any]):
    """An answer, with what is written to the state. A subclass can use it as any response."""

    def __init__(self, response: ModelResponse[Any], update: Update) -> None:
        self.result = response.result
        self.structured_response = response.structured_response
        self.command = Command(update=update)

    @classmethod
    def of(cls, response: ModelResponse[Any] | None, update: Update) -> "ChargedResponse":
        """The answer, or the final message to a call that was refused when it was to be made."""
        if response is not None:
            return cls(response, update)
        written = {**update}
        written.pop("jump_to", None)
        return cls(ModelResponse(written.pop("messages", [])), written)

    @property
    def model_response(self) -> ModelResponse[Any]:  # type: ignore[override]  # as it is now
        """The answer alone."""
        return ModelResponse(self.result, self.structured_response)


def has_ended(state: Mapping[str, Any]) -> bool:
    """Whether the newest message is that of a refused call, so the run has ended."""
    # The graph may go on nevertheless: LangChain does so if it waits for a structured response.
    newest = (state.get("messages") or (None,))[-1]
    return newest is not None and newest.id is not None and newest.id == ledger(state).get("ended")

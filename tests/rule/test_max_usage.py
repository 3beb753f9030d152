"""`max_usage`: the most tokens that a model call can use."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from langchain.agents.middleware.types import ModelRequest
from langchain.agents.structured_output import AutoStrategy, ProviderStrategy, ToolStrategy
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from langchain_quota import max_usage
from langchain_quota.limits.call import ModelUsage
from langchain_quota.testing import ScriptedChatModel
from tests.tokens import answer


class Capped(ScriptedChatModel):
    """A model with a limit of its answers."""

    max_tokens: int | None = None
    model_kwargs: Mapping[str, Any] = {}
    extra_body: Mapping[str, Any] | None = None
    service_tier: str | None = None
    provider: str = "mine"

    def _get_ls_params(self, stop: list[str] | None = None, **settings: Any) -> LangSmithParams:
        return LangSmithParams(ls_provider=self.provider, ls_model_name="small")


@tool
def search(query: str) -> str:
    """Search the web for a query, and give the first result."""
    return "found"


class Weather(BaseModel):
    """The weather of a city, as a long description says it."""

    city: str
    degrees: int


def bound(*messages: AnyMessage, **more: Any) -> ModelUsage:
    system = SystemMessage(more["system"]) if "system" in more else None
    return max_usage(
        ModelRequest(
            model=more.get("model") or Capped(script=[]),
            messages=[*messages],
            model_settings=dict(more.get("settings", {})),
            tools=[*more.get("tools", ())],
            system_message=system,
            response_format=more.get("response_format"),
        )
    )


def reported(total: int, *, by: str = "", **report: Any) -> AIMessage:
    """An answer whose call has used so much, as its provider says."""
    made = answer(total, text="Hi.", **report)
    return made.model_copy(update={"response_metadata": {"model_provider": by} if by else {}})


OLD = HumanMessage("z" * 9_000)
LINKED = {"type": "image_url", "image_url": {"url": "https://example.org/" + "a" * 500}}
INLINE = {"type": "image", "base64": "A" * 200, "mime_type": "image/png"}
LARGE = {"type": "file", "base64": "A" * 90_000, "mime_type": "application/pdf"}


SMALL = HumanMessage("Hi!")
SHORT = [HumanMessage("a")] * 50
LONG = [HumanMessage("é" * 1_000)]
AZURE = Capped(script=[], provider="azure")
WITH_TOOL: dict[str, Any] = {"system": "x" * 500, "tools": [search]}


@pytest.mark.parametrize(
    ("messages", "more", "least"),
    [
        (LONG, {}, 2_000),
        (LONG, {"system": "x" * 500}, 2_500),
        ([SMALL], {"tools": [search]}, 1_150),
        # The newest report counts, and has the prompt's other parts in it.
        ([reported(100), reported(200), AIMessage("x" * 70)], {}, 270),
        ([OLD, reported(3_000), ToolMessage("x" * 100, tool_call_id="1")], WITH_TOOL, 3_100),
        # Whose report it is matters; OpenAI's is Azure's, too.
        ([OLD, reported(2_000, by="mine")], {}, 2_000),
        ([OLD, reported(2_000, by="other")], {}, 9_000),
        ([OLD, reported(2_000, by="openai")], {"model": AZURE}, 2_000),
        ([OLD, reported(1_500, input_tokens=4_000, output_tokens=500)], {}, 4_500),
        # A report that cannot be true is none.
        *(([OLD, reported(total)], {}, 9_000) for total in (200, -20_000, 0)),
        ([OLD, reported(9, total_tokens="many")], {}, 9_000),
        # Many short messages are more tokens than a report of one call says.
        ([*SHORT, reported(60)], {}, 60),
        ([*SHORT, reported(20)], {}, 560),
        # Media.
        *(([HumanMessage([medium])], {}, 50_000) for medium in (LINKED, INLINE)),
        ([HumanMessage([LARGE])], {}, 90_000),
    ],
)
def test_the_prompt_is_bounded(
    messages: Sequence[AnyMessage], more: Mapping[str, Any], least: int
) -> None:
    """It is the newest report that can be of this call, and a token for each byte that is newer."""
    assert least <= bound(*messages, **more).input_tokens < least + 130


@pytest.mark.parametrize("strategy", [AutoStrategy, ProviderStrategy, ToolStrategy])
def test_a_schema_is_sent_too(strategy: Any) -> None:
    """The schema of a structured response is part of what is sent."""
    with_schema = bound(SMALL, response_format=strategy(Weather))
    assert with_schema.input_tokens > bound(SMALL).input_tokens + 100


@pytest.mark.parametrize(
    ("settings", "own", "most"),
    [
        ({"max_tokens": 7}, {"max_tokens": 50, "profile": {"max_output_tokens": 900}}, 7),
        ({"max_completion_tokens": 8}, {"profile": {}}, 8),
        ({"max_tokens": 7, "n": 3}, {}, 21),
        ({}, {"max_tokens": 50, "profile": {"max_output_tokens": 900}}, 50),
        ({}, {"profile": {"max_output_tokens": 900}}, 900),
        ({}, {"profile": None}, 16_384),
        ({"max_tokens": -5}, {"max_tokens": 50}, 50),
        ({"max_tokens": 7, "extra_body": {"max_tokens": 80}}, {"max_tokens": 50}, 80),
        ({"extra_body": {"max_tokens": 80}}, {}, 80),
    ],
)
def test_the_answer_is_bounded(settings: Any, own: Any, most: int) -> None:
    """The limit of an answer is the request's, the model's, or that of its profile."""
    found = bound(SMALL, model=Capped(script=[], **own), settings=settings)
    assert found.output_tokens == most
    assert found.total_tokens == found.input_tokens + most
    assert found.estimated


@pytest.mark.parametrize("name", ["speed", "service_tier"])
def test_what_a_model_sends_beside_its_fields_counts(name: str) -> None:
    """A dearer tier that is asked for, or that a model keeps with its settings, is in the bound."""
    model = Capped(script=[], model_kwargs={name: "fast", "n": 2}, extra_body={"max_tokens": 9})
    found = bound(SMALL, model=model)
    assert (getattr(found, name), found.output_tokens) == ("fast", 18)
    asked = bound(SMALL, model=model, settings={name: "slow"})
    assert getattr(asked, name) == "slow"

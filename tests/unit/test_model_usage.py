"""What is read of the results that providers' packages make, where these differ from each other."""

from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, Generation, LLMResult

from langchain_quota.model_usage import ModelUsage, charged_tokens, reported_usage

ASKED = ModelUsage(provider="mine", request_model="small", speed="fast")


def result(usage: Any, *, count: int = 1, llm_output: Any = None, **metadata: Any) -> LLMResult:
    message = AIMessage("Hello.", response_metadata=metadata)
    message = message.model_copy(update={"usage_metadata": usage})
    generations: Any = [[ChatGeneration(message=message)] * count]
    return LLMResult(generations=generations, llm_output=llm_output)


USED = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}


def test_what_is_not_said_is_as_it_was_asked() -> None:
    """A report of nothing but tokens leaves the names of the request."""
    usage = reported_usage(result(USED), ASKED)
    assert usage == ModelUsage(
        provider="mine",
        request_model="small",
        speed="fast",
        input_tokens=10,
        output_tokens=5,
        total_tokens=15,
    )
    assert usage.models == ("small",)


def test_the_provider_is_that_of_the_request() -> None:
    """Azure's answers say `openai`: who was asked is known better."""
    found = result(USED, model_provider="openai")
    assert reported_usage(found, ModelUsage(provider="azure")).provider == "azure"
    assert reported_usage(found, ModelUsage()).provider == "openai"


def test_several_answers_to_one_prompt_are_read_once() -> None:
    """Each of several answers repeats the usage of all; LangChain keeps the model's name apart."""
    found = result(USED, count=3, llm_output={"model_name": "small-2026"})
    usage = reported_usage(found, ASKED)
    assert usage.total_tokens == 15
    assert usage.models == ("small-2026", "small")


def test_the_total_is_the_providers() -> None:
    """A provider that adds what it does not list is believed."""
    assert reported_usage(result(USED | {"total_tokens": 40}), ASKED).total_tokens == 40


@pytest.mark.parametrize("usage", [None, {}, dict.fromkeys(USED, 0)])
def test_no_tokens_are_no_report(usage: Any) -> None:
    """What reports nothing, or noughts, is left to be estimated, with what is known of it."""
    found = reported_usage(result(usage, model_name="small-2026"), ASKED)
    assert (found.total_tokens, found.estimated) == (0, True)
    assert found.response_model == "small-2026"


def test_a_total_is_not_less_than_its_parts() -> None:
    """Where a report contradicts itself, the higher number is charged."""
    used = {"input_tokens": 5, "output_tokens": 100_000, "total_tokens": 1}
    assert reported_usage(result(used), ASKED).total_tokens == 100_005


@pytest.mark.parametrize("name", USED)
@pytest.mark.parametrize("nonsense", [-5, "100", 1.5, True, 10**30])
def test_what_is_no_number_of_tokens_is_no_report(name: str, nonsense: Any) -> None:
    """A number that tokens cannot have makes the report worthless: it is left to be estimated."""
    found = reported_usage(result(USED | {name: nonsense}), ASKED)
    assert (found.total_tokens, found.estimated) == (0, True)
    completion = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": nonsense}
    generations: Any = [[Generation(text="Hello.")]]
    text = LLMResult(generations=generations, llm_output={"token_usage": completion})
    assert reported_usage(text, ASKED).estimated


@pytest.mark.parametrize("nonsense", [-5, "100", 1.5, 10**30])
def test_a_detail_that_is_no_number_of_tokens_is_left_out(nonsense: Any) -> None:
    """The rest of the report is believed."""
    details = {"cache_read": nonsense, "ephemeral_1h_input_tokens": nonsense}
    found = reported_usage(result(USED | {"input_token_details": details}), ASKED)
    assert (found.cache_read_tokens, found.cache_creation_1h_tokens) == (0, 0)
    assert found.total_tokens == 15


@pytest.mark.parametrize("usage", [{"total_cost": 0}, USED | {"total_cost": 0}])
def test_langchains_cache_is_known(usage: Any) -> None:
    """An answer from LangChain's response cache is charged nothing, though it has tokens."""
    found = reported_usage(result(usage), ASKED)
    assert found.cached
    assert not found.estimated
    assert [charged_tokens(found, kind) for kind in ("total", "input", "output")] == [0, 0, 0]


def test_tokens_are_charged_by_their_kind() -> None:
    """A budget is charged the tokens that it counts."""
    usage = reported_usage(result(USED), ASKED)
    assert [charged_tokens(usage, kind) for kind in ("total", "input", "output")] == [15, 10, 5]


def test_sounds_are_parts() -> None:
    """Tokens of sounds are read, with a tier and without."""
    details = {"input_token_details": {"audio": 3}, "output_token_details": {"priority_audio": 2}}
    usage = reported_usage(result(USED | details), ASKED)
    assert (usage.input_audio_tokens, usage.output_audio_tokens) == (3, 2)


@pytest.mark.parametrize(
    ("token_usage", "used"),
    [
        ({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}, (10, 5, 15, False)),
        ({"prompt_tokens": 10, "completion_tokens": 5}, (10, 5, 15, False)),
        ({}, (0, 0, 0, False)),
        (None, (0, 0, 0, True)),
    ],
    ids=["first of a batch", "without a total", "another of a batch", "no report"],
)
def test_completion_models_are_read(token_usage: Any, used: Any) -> None:
    """A completion model reports beside its text; of a batch, the first prompt has it all."""
    output = {"token_usage": token_usage} if token_usage is not None else None
    found = LLMResult(generations=[[Generation(text="Hello.")]], llm_output=output)
    usage = reported_usage(found, ASKED)
    numbers = (usage.input_tokens, usage.output_tokens, usage.total_tokens, usage.estimated)
    assert numbers == used


@pytest.mark.parametrize("generations", [[], [[]]])
def test_a_result_without_an_answer_is_no_report(generations: Any) -> None:
    """A model that gives nothing is left to be estimated."""
    assert reported_usage(LLMResult(generations=generations), ASKED).estimated

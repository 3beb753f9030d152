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


@pytest.mark.parametrize("usage", [{"total_cost": 0}, USED | {"total_cost": 0}])
def test_langchains_cache_is_known(usage: Any) -> None:
    """An answer from LangChain's response cache is charged nothing, though it has tokens."""
    found = reported_usage(result(usage), ASKED)
    assert found.cached
    assert not found.estimated
    assert [charged_tokens(found, kind) for kind in ("total", "input", "output")] == [0, 0, 0]


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

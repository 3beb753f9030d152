"""What a model request says of the budget, and which tools it offers."""

from typing import Any

import pytest
from langchain.agents.middleware.types import ModelRequest
from langchain.agents.structured_output import AutoStrategy, ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import BaseTool, tool
from pydantic import BaseModel

from langchain_quota import ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.middleware._model_request import (
    NO_TOOLS,
    last_call,
    remaining,
    with_note,
    without_exhausted,
)
from langchain_quota.resolved import ResolvedLimit, ResolvedLimits
from langchain_quota.testing import ScriptedChatModel

NEAR = 0.8


class Weather(BaseModel):
    """What the agent answers with."""

    degrees: int


@tool
def search(query: str) -> str:
    """Search."""
    return query


@tool
def calc(query: str) -> str:
    """Calculate."""
    return query


def asked() -> list[AnyMessage]:
    return [HumanMessage("How warm is it?", id="h")]


def after_a_call() -> list[AnyMessage]:
    """A history in which a tool was called: some providers then refuse an empty list of tools."""
    call = {"name": "search", "args": {}, "id": "a", "type": "tool_call"}
    return [
        *asked(),
        AIMessage("", tool_calls=[call], id="m"),
        ToolMessage("12", tool_call_id="a", id="t"),
    ]


def request(
    messages: list[AnyMessage], *tools: BaseTool | dict[str, Any], **arguments: Any
) -> ModelRequest[Any]:
    arguments.setdefault("model", ScriptedChatModel(script=[]))
    return ModelRequest(messages=messages, tools=list(tools), **arguments)


def names(offered: ModelRequest[Any]) -> list[str]:
    return [each["name"] if isinstance(each, dict) else each.name for each in offered.tools]


def limits_of(*limits: Limit | ResolvedLimit) -> ResolvedLimits:
    return ResolvedLimits(
        each if isinstance(each, ResolvedLimit) else ResolvedLimit.of(each) for each in limits
    )


def counts_of(limits: ResolvedLimits, **used: tuple[int, ...]) -> dict[str, int]:
    """The counts where so much is used (of thread, run, and each quota), by what is counted.

    Without a name for it, `all_tools` stands for all tools, and `all_but_calc` for those but one.
    """
    names = {"all_tools": "__all__", "all_but_calc": "__all__-calc", "both": "calc,search"}
    by_counter = {names.get(name, name): numbers for name, numbers in used.items()}
    counts: dict[str, int] = {}
    for each in limits.limits:
        rows = limits.rows(each)
        numbers = (*by_counter.get(each.limit.counter, ()), *[0] * len(rows))
        counts |= {row.counter: number for row, number in zip(rows, numbers, strict=False)}
    return counts


def note(*limits: Limit | ResolvedLimit, **used: tuple[int, ...]) -> str | None:
    """The note where so much is used."""
    resolved = limits_of(*limits)
    return remaining(resolved, counts_of(resolved, **used), near=NEAR)


def shaped(
    given: ModelRequest[Any], *limits: Limit | ResolvedLimit, **used: tuple[int, ...]
) -> tuple[ModelRequest[Any], str | None]:
    """The request without exhausted tools where so much is used, and the note."""
    resolved = limits_of(*limits)
    return without_exhausted(given, resolved, counts_of(resolved, **used))


NO_SEARCH = ToolCallLimit("search", run_limit=0)
NOTHING_LEFT = ToolCallLimit(run_limit=0)


IMAGE: dict[Any, Any] = {"type": "image", "url": "https://example.org/cat.png"}
NOTE: dict[Any, Any] = {"type": "text", "text": "NOTE"}


def answer(content: Any, **arguments: Any) -> ToolMessage:
    return ToolMessage(content, tool_call_id="a", id="t", **arguments)


@pytest.mark.parametrize(
    ("newest", "expected"),
    [
        (HumanMessage("How warm is it?", id="h", name="ann"), "How warm is it?\n\nNOTE"),
        (HumanMessage("", id="h"), "NOTE"),
        (HumanMessage([IMAGE], id="h"), [IMAGE, NOTE]),
        (answer("12", name="search", artifact={"rows": 3}), "12\n\nNOTE"),
        (answer("no", status="error"), "no\n\nNOTE"),
        (answer(""), "NOTE"),
        (answer([]), "NOTE"),
        (answer([IMAGE], artifact={"rows": 3}), [IMAGE, NOTE]),
        (answer(["12"]), ["12", NOTE]),
    ],
)
def test_a_note_ends_the_newest_message(newest: AnyMessage, expected: Any) -> None:
    """It adds to the content, as a part of its own where there are parts; all else stays."""
    history = [*after_a_call(), newest]
    before = [message.model_dump_json() for message in history]
    noted = with_note(history, "NOTE")
    assert noted[:-1] == history[:-1]
    assert noted[-1].content == expected
    assert noted[-1].model_dump(exclude={"content"}) == newest.model_dump(exclude={"content"})
    # The history itself is as it was.
    assert [message.model_dump_json() for message in history] == before


@pytest.mark.parametrize(
    "history",
    [
        [],
        [*asked(), AIMessage("hm")],
        [*asked(), SystemMessage("Be brief.")],
        [answer([{"type": "tool_result", "tool_use_id": "a", "content": "12"}])],
        [answer([{"type": "custom_tool_call_output", "output": "12"}])],
        [answer([{"type": "non_standard", "value": {"type": "computer_call_output"}}])],
        [answer("https://example.org", additional_kwargs={"type": "computer_call_output"})],
    ],
)
def test_a_note_of_its_own(history: list[AnyMessage]) -> None:
    """Where the newest message takes no text the note is a human message behind it."""
    noted = with_note(history, "NOTE")
    assert noted[:-1] == history
    assert (noted[-1].type, noted[-1].content) == ("human", "NOTE")


CAPABLE = ScriptedChatModel(script=[], profile={"structured_output": True})


@pytest.mark.parametrize(
    ("history", "arguments", "stay"),
    [
        (asked(), {}, False),
        (asked(), {"response_format": ProviderStrategy(Weather)}, False),
        (after_a_call(), {}, True),
        (after_a_call(), {"response_format": ProviderStrategy(Weather)}, True),
        (after_a_call(), {"response_format": ToolStrategy(Weather)}, False),
        (after_a_call(), {"response_format": AutoStrategy(Weather)}, False),
        # Such a model gets no tool for its structured output.
        (after_a_call(), {"response_format": AutoStrategy(Weather), "model": CAPABLE}, True),
    ],
)
def test_an_empty_list_of_tools(
    history: list[AnyMessage],
    arguments: Any,
    stay: bool,  # noqa: FBT001 - a row of the table
) -> None:
    """Where the list would be empty and the history has calls, the tools stay, with a note.

    Unless the structured response is a tool, which is added to the list afterwards.
    """
    given = request(history, search, calc, **arguments)
    offered, said = shaped(given, NOTHING_LEFT)
    finalized = last_call(given)
    assert names(offered) == names(finalized) == (["search", "calc"] if stay else [])
    assert said == (NO_TOOLS if stay else None)
    assert offered.response_format is finalized.response_format is given.response_format


def naming(tool: str) -> list[Any]:
    """The ways to force a tool: by name, OpenAI's and Anthropic's."""
    return [
        tool,
        {"type": "function", "function": {"name": tool}},
        {"type": "tool", "name": tool},
    ]


def test_a_choice_of_tools_on_offer_is_kept() -> None:
    """How the model must choose among the tools that are left is the application's."""
    for choice in ["any", "auto", "required", "none", None, *naming("calc")]:
        given = request(asked(), calc, search, tool_choice=choice)
        offered, _ = shaped(given, NO_SEARCH)
        assert offered.tool_choice == choice


@pytest.mark.parametrize("choice", naming("search"), ids=["name", "function", "tool"])
def test_a_choice_of_a_hidden_tool_is_dropped(choice: Any) -> None:
    """A request that forces a tool which it does not offer would be refused by the provider."""
    offered, _ = shaped(request(asked(), calc, search, tool_choice=choice), NO_SEARCH)
    assert names(offered) == ["calc"]
    assert offered.tool_choice is None

"""What the model is told of its budget, and which tools it is offered."""

from typing import Any

import pytest
from langchain.agents.middleware.types import ModelRequest, ModelResponse
from langchain.agents.structured_output import AutoStrategy, ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, tool
from pydantic import BaseModel

from langchain_quota import ModelCallLimit, Quota, QuotaMiddleware, ToolCallLimit
from langchain_quota.engine import Used
from langchain_quota.limits import Limit, QuotaTerms, Terms
from langchain_quota.middleware.requests import (
    LAST_CALL,
    NO_TOOLS,
    last_call,
    remaining,
    with_note,
    without_exhausted,
)
from langchain_quota.state import LEDGER, Ledger
from langchain_quota.testing import ScriptedChatModel
from tests.conftest import Signals

NEAR = 0.8
PROVIDER_TOOL = {"type": "web_search", "name": "web_search"}


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


def note(limits: list[Limit | Terms], **used: tuple[int, int]) -> str | None:
    """The note where so much (thread, run) is used, by counter; `all_tools` for all tools."""
    terms = [each if isinstance(each, Terms) else Terms.of(each) for each in limits]
    counts = {
        counter.replace("all_tools", "__all__"): Used(*each) for counter, each in used.items()
    }
    usage = {each.limit.name: counts.get(each.limit.counter, Used()) for each in terms}
    return remaining(terms, usage, near=NEAR)


def shaped(
    offered: ModelRequest[Any], limit: Limit, used: int = 0
) -> tuple[ModelRequest[Any], str | None]:
    """The request without exhausted tools, where a thread and its run have used so much."""
    return without_exhausted(offered, [Terms.of(limit)], {limit.name: Used(used, used)})


def test_nothing_is_said_while_nothing_is_near() -> None:
    """Below every near share the model is not bothered."""
    limits: list[Limit | Terms] = [
        ToolCallLimit("search", run_limit=10),
        ModelCallLimit(run_limit=10),
    ]
    assert note(limits, search=(7, 7), model=(7, 7)) is None
    assert note([]) is None


def test_once_one_is_near_all_are_told() -> None:
    """The note tells what is left of each limit, and which model call this is."""
    limits: list[Limit | Terms] = [
        ToolCallLimit("search", run_limit=3),
        ToolCallLimit(run_limit=9),
        ModelCallLimit(run_limit=10),
    ]
    assert note(limits, search=(2, 2), all_tools=(5, 5), model=(8, 8)) == (
        "Budget: search: 1 of 3 left; all tools: 4 of 9 left; this is model call 8 of 10."
    )
    assert note(limits, search=(2, 2), all_tools=(5, 5), model=(7, 7)) is None


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (ToolCallLimit(["search", "calc"], run_limit=2), "calc, search: 0 of 2 left"),
        (ToolCallLimit(exclude=["calc"], run_limit=2), "all tools but calc: 0 of 2 left"),
        (ToolCallLimit("search", run_limit=0), "search: 0 of 0 left"),
        (ToolCallLimit("search", run_limit=1), "search: 0 of 1 left"),
    ],
)
def test_the_words_of_a_limit(limit: Limit, expected: str) -> None:
    """A limit is told by its tools; one that is used up, or passed, has 0 left."""
    said = remaining([Terms.of(limit)], {limit.name: Used(2, 2)}, near=NEAR)
    assert said == f"Budget: {expected}."


def test_a_tool_called_model_is_a_tool() -> None:
    """What is left for a tool of this name is told as such, not as a number of model calls."""
    assert (
        note([ToolCallLimit("model", run_limit=2)], model=(2, 2)) == "Budget: model: 0 of 2 left."
    )


def test_counts_of_a_tool_and_of_the_model_are_apart(signals: Signals) -> None:
    """A middleware reads what is used of a tool called as the model's counter from the tools."""
    quota: QuotaMiddleware[Any, Any] = QuotaMiddleware(
        [ToolCallLimit("model", run_limit=5), ModelCallLimit(run_limit=9)],
        tell_model=True,
        telemetry=signals.telemetry,
    )
    sent: list[ModelRequest[Any]] = []

    def handler(received: ModelRequest[Any]) -> ModelResponse[Any]:
        sent.append(received)
        return ModelResponse(result=[AIMessage("ok")])

    state: Any = {
        "messages": asked(),
        "thread_tool_call_count": {"model": 4},
        LEDGER: Ledger(run_tools={"model": 4}, run_model=2),
    }
    quota.wrap_model_call(request(asked(), state=state), handler)
    assert sent[0].messages[-1].content == (
        "How warm is it?\n\nBudget: model: 1 of 5 left; this is model call 2 of 9."
    )


def test_the_scarcer_scope_is_told() -> None:
    """Of a thread's and a run's limit the one with less left is told, whichever it is."""
    limits: list[Limit | Terms] = [ToolCallLimit("search", thread_limit=20, run_limit=3)]
    assert note(limits, search=(10, 3)) == "Budget: search: 0 of 3 left."
    assert note(limits, search=(19, 0)) == "Budget: search: 1 of 20 left."


def test_either_scope_makes_a_limit_near() -> None:
    """A thread near its limit is told where the run, with less left, is not near its own."""
    limits: list[Limit | Terms] = [ToolCallLimit("search", thread_limit=100, run_limit=3)]
    assert note(limits, search=(80, 0)) == "Budget: search: 3 of 3 left."
    assert note(limits, search=(79, 0)) is None


def test_a_limits_own_near_is_heard() -> None:
    """A limit with a near share of its own speaks from there on."""
    assert note([ToolCallLimit("search", run_limit=10, near=0.5)], search=(5, 5)) is not None
    assert note([ToolCallLimit("search", run_limit=10, near=1.0)], search=(9, 9)) is None


def test_a_limit_on_trial_is_not_mentioned() -> None:
    """What refuses nothing neither makes a note nor stands in it."""
    trial = ToolCallLimit("search", run_limit=1, enforce=False)
    assert note([trial], search=(5, 5)) is None
    hard = ToolCallLimit(run_limit=1)
    assert note([trial, hard], search=(5, 5), all_tools=(1, 1)) == "Budget: all tools: 0 of 1 left."


def test_computed_numbers_are_told() -> None:
    """A limit that is a function is told by its number, and not at all where it has none."""
    limit = ToolCallLimit("search", run_limit=lambda *_: 0)
    assert note([Terms.of(limit, run_limit=4)], search=(4, 4)) == "Budget: search: 0 of 4 left."
    none = Terms.of(limit, run_limit=None)
    assert note([none], search=(4, 4)) is None
    hard = ToolCallLimit(run_limit=1)
    assert note([none, hard], all_tools=(1, 1)) == "Budget: all tools: 0 of 1 left."


def test_a_note_stands_in_the_newest_human_message() -> None:
    """The note ends the text of the last human message, wherever that stands; the rest stays."""
    history = [HumanMessage("first", id="1"), AIMessage("hm"), *after_a_call()]
    told = with_note(history, "NOTE")
    assert told[2].content == "How warm is it?\n\nNOTE"
    assert (told[2].id, told[2].type) == ("h", "human")
    assert told[:2] + told[3:] == history[:2] + history[3:]


def test_a_note_in_a_message_of_parts() -> None:
    """A human message of several parts, an image say, gets the note as a part of its own."""
    parts: list[str | dict[Any, Any]] = [
        {"type": "text", "text": "What is this?"},
        {"type": "image", "url": "https://example.org/cat.png"},
    ]
    (told,) = with_note([HumanMessage(content=parts)], "NOTE")
    assert told.content == [*parts, {"type": "text", "text": "NOTE"}]


@pytest.mark.parametrize("history", [[], [AIMessage("hm")]], ids=["empty", "only the model"])
def test_a_note_without_a_human_message(history: list[AnyMessage]) -> None:
    """Where no human spoke the note is a human message at the end, never a system message."""
    told = with_note(history, "NOTE")
    assert told[:-1] == history
    assert (told[-1].type, told[-1].content) == ("human", "NOTE")


@pytest.mark.parametrize("content", ["text", [{"type": "text", "text": "text"}]], ids=str)
def test_a_note_is_not_kept(content: Any) -> None:
    """The messages that were given, which are the history, stay as they were."""
    message = HumanMessage(content=content)
    history: list[AnyMessage] = [message]
    before = message.model_dump_json()
    with_note(history, "NOTE")
    assert history == [message]
    assert message.model_dump_json() == before


def test_exhausted_tools_are_not_offered() -> None:
    """A tool with nothing left goes; the others stay, in order, without a word."""
    offered, said = shaped(request(asked(), calc, search), ToolCallLimit("search", run_limit=2), 2)
    assert names(offered) == ["calc"]
    assert said is None


def test_while_something_is_left_all_are_offered() -> None:
    """One call short of the limit the request is the one that was given."""
    given = request(asked(), calc, search)
    assert shaped(given, ToolCallLimit("search", run_limit=2), 1) == (given, None)


def test_the_request_that_was_given_stays_as_it_was() -> None:
    """Other middlewares may hold the request: its list of tools is not changed."""
    given = request(asked(), calc, search)
    shaped(given, ToolCallLimit("search", run_limit=0))
    last_call(given)
    assert names(given) == ["calc", "search"]
    assert given.messages == asked()


@pytest.mark.parametrize(
    ("used", "expected"), [(Used(5, 0), []), (Used(4, 1), []), (Used(4, 0), ["search"])]
)
def test_either_scope_exhausts_a_tool(used: Used, expected: list[str]) -> None:
    """A tool goes when its thread has nothing left, or its run."""
    terms = Terms.of(ToolCallLimit("search", thread_limit=5, run_limit=1))
    offered, _ = without_exhausted(request(asked(), search), [terms], {"tool:search": used})
    assert names(offered) == expected


def test_a_limit_of_several_tools_hides_all_of_them() -> None:
    """Tools that share a count go together; an excluded tool stays."""
    limit = ToolCallLimit(["calc", "search"], run_limit=1)
    assert names(shaped(request(asked(), calc, search), limit, 1)[0]) == []
    excluding = ToolCallLimit(exclude=["calc"], run_limit=1)
    offered, _ = shaped(request(asked(), calc, search), excluding, 1)
    assert names(offered) == ["calc"]


def test_a_limit_on_trial_hides_nothing() -> None:
    """What would only be told as `would_block` stays on offer."""
    limit = ToolCallLimit("search", run_limit=0, enforce=False)
    assert names(shaped(request(asked(), search), limit)[0]) == ["search"]


def test_a_limit_of_the_model_hides_nothing() -> None:
    """A model that has used its calls up says nothing of tools."""
    given = request(asked(), search)
    assert names(shaped(given, ModelCallLimit(run_limit=1), 1)[0]) == ["search"]


def test_hiding_leaves_provider_tools() -> None:
    """A tool that runs at the provider cannot be counted, so it is not hidden."""
    offered, said = shaped(request(asked(), search, PROVIDER_TOOL), ToolCallLimit(run_limit=0))
    assert names(offered) == ["web_search"]
    assert said is None


@pytest.mark.parametrize("history", [asked(), after_a_call()], ids=["no calls", "calls"])
@pytest.mark.parametrize(
    ("strategy", "adds_a_tool"),
    [
        (None, False),
        (ToolStrategy(Weather), True),
        (AutoStrategy(Weather), True),
        (ProviderStrategy(Weather), False),
    ],
    ids=["none", "tool", "auto", "provider"],
)
def test_an_empty_list(
    history: list[AnyMessage],
    strategy: Any,
    adds_a_tool: bool,  # noqa: FBT001 - a row of the table
) -> None:
    """Where the list would be empty and the history has calls, the tools stay, with a note.

    Unless the structured response is a tool, which is added to the list afterwards.
    """
    given = request(history, search, calc, response_format=strategy)
    offered, said = shaped(given, ToolCallLimit(run_limit=0))
    finalized = last_call(given)
    if len(history) > 1 and not adds_a_tool:
        assert names(offered) == names(finalized) == ["search", "calc"]
        assert said == NO_TOOLS
    else:
        assert names(offered) == names(finalized) == []
        assert said is None
    assert offered.response_format is finalized.response_format is strategy


def test_an_automatic_strategy_may_be_the_providers() -> None:
    """A model with structured output of its own gets no tool for it: its list would be empty."""
    capable = ScriptedChatModel(script=[], profile={"structured_output": True})
    given = request(after_a_call(), search, model=capable, response_format=AutoStrategy(Weather))
    offered, said = shaped(given, ToolCallLimit(run_limit=0))
    assert names(offered) == ["search"]
    assert said == NO_TOOLS
    assert names(last_call(given)) == ["search"]


@pytest.mark.parametrize("choice", ["any", "auto", "required", "none", None])
def test_a_choice_of_any_tool_is_kept(choice: str | None) -> None:
    """While tools are left, how the model must choose among them stays."""
    given = request(asked(), calc, search, tool_choice=choice)
    offered, _ = shaped(given, ToolCallLimit("search", run_limit=0))
    assert offered.tool_choice == choice


def naming(tool: str) -> list[Any]:
    """The ways to force a tool: by name, OpenAI's and Anthropic's."""
    return [
        tool,
        {"type": "function", "function": {"name": tool}},
        {"type": "tool", "name": tool},
    ]


WAYS = ["name", "function", "tool"]
NAMING_SEARCH = naming("search")


@pytest.mark.parametrize("choice", NAMING_SEARCH, ids=WAYS)
def test_a_choice_of_a_hidden_tool_is_dropped(choice: Any) -> None:
    """A request that forces a tool which it does not offer would be refused by the provider."""
    given = request(asked(), calc, search, tool_choice=choice)
    offered, _ = shaped(given, ToolCallLimit("search", run_limit=0))
    assert names(offered) == ["calc"]
    assert offered.tool_choice is None


@pytest.mark.parametrize("choice", naming("calc"), ids=WAYS)
def test_a_choice_of_a_tool_that_stays_is_kept(choice: Any) -> None:
    """The application's choice of a tool that is still on offer is none of ours."""
    given = request(asked(), calc, search, tool_choice=choice)
    offered, _ = shaped(given, ToolCallLimit("search", run_limit=0))
    assert offered.tool_choice == choice


@pytest.mark.parametrize(
    "choice", ["any", "required", "auto", *NAMING_SEARCH], ids=["any", "required", "auto", *WAYS]
)
def test_without_tools_there_is_no_choice(choice: Any) -> None:
    """A choice among no tools would be refused by the provider."""
    given = request(asked(), search, tool_choice=choice)
    offered, _ = shaped(given, ToolCallLimit("search", run_limit=0))
    assert (offered.tools, offered.tool_choice) == ([], None)
    assert last_call(given).tool_choice is None


@pytest.mark.parametrize(
    "choice", ["any", "required", *NAMING_SEARCH], ids=["any", "required", *WAYS]
)
def test_tools_that_must_stay_are_not_forced(choice: Any) -> None:
    """Tools that are offered only for the provider's sake are not what the model has to call."""
    given = request(after_a_call(), search, tool_choice=choice)
    offered, said = shaped(given, ToolCallLimit("search", run_limit=0))
    assert said == NO_TOOLS
    assert offered.tool_choice in [None, "auto", "none"]
    assert last_call(given).tool_choice in [None, "auto", "none"]


def test_the_last_call_is_told_so() -> None:
    """It is offered no tools, not even the provider's, and told to answer."""
    offered = last_call(request(asked(), search, calc, PROVIDER_TOOL))
    assert offered.tools == []
    assert offered.messages[-1].content == f"How warm is it?\n\n{LAST_CALL}"


def test_the_last_call_after_other_calls_is_told_so() -> None:
    """Where the tools have to stay, the words alone say that none may be called."""
    offered = last_call(request(after_a_call(), search, PROVIDER_TOOL))
    assert names(offered) == ["search", "web_search"]
    assert LAST_CALL in str(offered.messages[0].content)
    assert [message.type for message in offered.messages] == ["human", "ai", "tool"]


def test_the_last_call_without_tools() -> None:
    """An agent without tools is told like any other."""
    offered = last_call(request(asked()))
    assert offered.tools == []
    assert LAST_CALL in str(offered.messages[-1].content)


def of_user(limit: Limit, *numbers: int) -> Terms:
    """The terms of a limit with quotas of these numbers."""
    quotas = [
        QuotaTerms(f"quota_{'abc'[index]}", number, "ann", f"key-{index}")
        for index, number in enumerate(numbers)
    ]
    return Terms.of(limit, quotas=tuple(quotas))


PER_USER = ToolCallLimit("search", quotas=[Quota(9, per="user_id")])


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ((0, (7,)), None),
        ((0, (8,)), "Budget: search: 2 of 10 left."),
        ((0, (12,)), "Budget: search: 0 of 10 left."),
    ],
)
def test_what_is_left_of_a_quota(used: tuple[int, tuple[int, ...]], expected: str | None) -> None:
    """The note says what is left to the user, and does not say whose quota it is."""
    counts = {PER_USER.name: Used(used[0], 0, used[1])}
    assert remaining([of_user(PER_USER, 10)], counts, near=NEAR) == expected


def test_the_scarcest_of_quotas_is_told() -> None:
    """Of a thread limit and two quotas the one with the least left is named."""
    limit = ToolCallLimit("search", thread_limit=9, quotas=[Quota(9, per="user_id")])
    terms = of_user(limit, 10, 100)
    assert remaining([terms], {limit.name: Used(8, 0, (4, 50))}, near=NEAR) == (
        "Budget: search: 1 of 9 left."
    )
    assert remaining([terms], {limit.name: Used(2, 0, (8, 50))}, near=NEAR) == (
        "Budget: search: 2 of 10 left."
    )


def test_the_models_quota_is_told() -> None:
    """The model reads which of the user's calls this is."""
    limit = ModelCallLimit(quotas=[Quota(9, per="user_id")])
    note = remaining([of_user(limit, 10)], {limit.name: Used(1, 1, (9,))}, near=NEAR)
    assert note == "Budget: this is model call 9 of 10."


def test_nothing_is_said_of_what_is_not_known() -> None:
    """Where the store does not answer, a limit of quotas alone has no part in the note."""
    near = ToolCallLimit("calc", run_limit=10)
    usage = {PER_USER.name: Used(), near.name: Used(8, 8)}
    terms = [of_user(PER_USER, 0), Terms.of(near)]
    assert remaining(terms, usage, near=NEAR) == "Budget: calc: 2 of 10 left."
    assert remaining(terms[:1], usage, near=NEAR) is None


def test_a_tool_without_quota_left_is_not_offered() -> None:
    """What the user has used up is hidden; where the store does not answer, it is offered."""
    offered = request(asked(), search, calc)
    terms = [of_user(PER_USER, 10)]
    for used, expected in (
        (Used(0, 0, (10,)), ["calc"]),
        (Used(0, 0, (9,)), ["search", "calc"]),
        (Used(0, 0), ["search", "calc"]),
    ):
        shown, _ = without_exhausted(offered, terms, {PER_USER.name: used})
        assert names(shown) == expected

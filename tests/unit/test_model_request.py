"""What a model request says of the budget, and which tools it offers."""

from typing import Any

import pytest
from langchain.agents.middleware.types import ModelRequest, ModelResponse
from langchain.agents.structured_output import AutoStrategy, ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import BaseTool, tool
from pydantic import BaseModel

from langchain_quota import ModelCallLimit, Quota, QuotaMiddleware, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.middleware._model_request import (
    LAST_CALL,
    NO_TOOLS,
    last_call,
    remaining,
    with_note,
    with_state,
    without_exhausted,
)
from langchain_quota.resolved import ResolvedLimit, ResolvedLimits, ResolvedQuota
from langchain_quota.state import LEDGER, Ledger
from langchain_quota.testing import ScriptedChatModel
from tests.signals import Signals

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


def test_once_a_limit_is_near_all_are_named() -> None:
    """The note says what is left of each, and which model call this is; else there is none."""
    limits: list[Limit] = [
        ToolCallLimit("search", run_limit=3),
        ToolCallLimit(run_limit=9),
        ModelCallLimit(run_limit=10),
    ]
    assert note(*limits, search=(2, 2), all_tools=(5, 5), model=(7, 7)) is None
    assert note(*limits, search=(2, 2), all_tools=(5, 5), model=(8, 8)) == (
        "Budget: search: 1 of 3 left; all tools: 4 of 9 left; this is model call 8 of 10."
    )


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        (ToolCallLimit(["search", "calc"], run_limit=2), {"both": (2, 2)}, "calc, search: 0 of 2"),
        (
            ToolCallLimit(exclude=["calc"], run_limit=2),
            {"all_but_calc": (2, 2)},
            "all tools but calc: 0 of 2",
        ),
        (ToolCallLimit("search", run_limit=0), {}, "search: 0 of 0"),
        (ToolCallLimit("search", run_limit=1), {"search": (2, 2)}, "search: 0 of 1"),
    ],
)
def test_the_words_of_a_limit(limit: Limit, used: Any, expected: str) -> None:
    """A limit is named by its tools; one that is used up, or passed, has 0 left."""
    assert note(limit, **used) == f"Budget: {expected} left."


def test_counts_of_a_tool_and_of_the_model_are_apart(signals: Signals) -> None:
    """A tool called `model` has what it has used of its own, and not the model's calls."""
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


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        (ToolCallLimit("search", thread_limit=20, run_limit=3), (10, 3), "0 of 3"),
        (ToolCallLimit("search", thread_limit=20, run_limit=3), (19, 0), "1 of 20"),
        # Near is one scope, scarcer the other.
        (ToolCallLimit("search", thread_limit=100, run_limit=3), (80, 0), "3 of 3"),
        (ToolCallLimit("search", thread_limit=100, run_limit=3), (79, 0), None),
        (ToolCallLimit("search", run_limit=10, near=0.5), (5, 5), "5 of 10"),
        (ToolCallLimit("search", run_limit=10, near=1.0), (9, 9), None),
    ],
)
def test_the_scarcest_scope_is_named(
    limit: Limit, used: tuple[int, int], expected: str | None
) -> None:
    """Any scope makes a limit near, at its own near share if it has one; the scarcest is named."""
    said = note(limit, search=used)
    assert said == (None if expected is None else f"Budget: search: {expected} left.")


@pytest.mark.parametrize(
    "silent",
    [
        ToolCallLimit("search", run_limit=1, enforce=False),
        ResolvedLimit.of(ToolCallLimit("search", run_limit=lambda *_: 0), run_limit=None),
    ],
    ids=["on trial", "no number now"],
)
def test_what_refuses_nothing_is_not_mentioned(silent: Limit | ResolvedLimit) -> None:
    """It neither causes a note nor is named in one."""
    assert note(silent, search=(5, 5)) is None
    hard = ToolCallLimit(run_limit=1)
    assert note(silent, hard, search=(5, 5), all_tools=(1, 1)) == "Budget: all tools: 0 of 1 left."


def user_quota(limit: Limit, *numbers: int) -> ResolvedLimit:
    """A limit with quotas of these numbers."""
    quotas = [
        ResolvedQuota(f"quota_{'abc'[index]}", number, "ann", f"key-{index}")
        for index, number in enumerate(numbers)
    ]
    return ResolvedLimit.of(limit, quotas=tuple(quotas))


PER_USER = ToolCallLimit("search", quotas=[Quota(9, per="user_id")])
OF_THREAD_AND_USER = ToolCallLimit("search", thread_limit=9, quotas=[Quota(9, per="user_id")])


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        (user_quota(PER_USER, 10), (0, 0, 7), None),
        (user_quota(PER_USER, 10), (0, 0, 8), "2 of 10"),
        (user_quota(PER_USER, 10), (0, 0, 12), "0 of 10"),
        (user_quota(OF_THREAD_AND_USER, 10, 100), (8, 0, 4, 50), "1 of 9"),
        (user_quota(OF_THREAD_AND_USER, 10, 100), (2, 0, 8, 50), "2 of 10"),
    ],
)
def test_what_is_left_of_a_quota(
    limit: ResolvedLimit, used: tuple[int, ...], expected: str | None
) -> None:
    """The note says what is left to the user, and does not say whose quota it is."""
    said = note(limit, search=used)
    assert said == (None if expected is None else f"Budget: search: {expected} left.")


def test_which_call_of_a_quota_this_is() -> None:
    """The model reads which of the user's calls this is."""
    limit = user_quota(ModelCallLimit(quotas=[Quota(9, per="user_id")]), 10)
    assert note(limit, model=(1, 1, 9)) == "Budget: this is model call 9 of 10."


def test_what_is_not_known_is_not_mentioned() -> None:
    """Where the store does not answer, quotas have no part in the note, and hide no tool."""
    calc_limit = ToolCallLimit("calc", run_limit=10)
    limits = limits_of(user_quota(PER_USER, 0), calc_limit).without_store("allow")
    counts = counts_of(limits, calc=(8, 8))
    assert remaining(limits, counts, near=NEAR) == "Budget: calc: 2 of 10 left."
    given = request(asked(), search, calc)
    assert without_exhausted(given, limits, counts) == (given, None)


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


class Text(str):
    """A text that nobody may walk through: a tool's answer can be long."""

    __slots__ = ()

    def __iter__(self) -> Any:
        raise AssertionError(self)


def test_a_text_is_not_searched_for_blocks() -> None:
    """An answer that is a text has no blocks to look at."""
    newest = answer("").model_copy(update={"content": Text("12")})
    assert with_note([newest], "NOTE")[0].content == "12\n\nNOTE"


IN_BOTH_SCOPES = ToolCallLimit("search", thread_limit=5, run_limit=1)


@pytest.mark.parametrize(
    ("limit", "used", "offered"),
    [
        (ToolCallLimit("search", run_limit=2), {"search": (2, 2)}, ["calc"]),
        (ToolCallLimit("search", run_limit=2), {"search": (1, 1)}, ["calc", "search"]),
        (IN_BOTH_SCOPES, {"search": (5, 0)}, ["calc"]),
        (IN_BOTH_SCOPES, {"search": (4, 1)}, ["calc"]),
        (IN_BOTH_SCOPES, {"search": (4, 0)}, ["calc", "search"]),
        (user_quota(PER_USER, 10), {"search": (0, 0, 10)}, ["calc"]),
        (user_quota(PER_USER, 10), {"search": (0, 0, 9)}, ["calc", "search"]),
        (ToolCallLimit(["calc", "search"], run_limit=1), {"both": (1, 1)}, []),
        (ToolCallLimit(exclude=["calc"], run_limit=1), {"all_but_calc": (1, 1)}, ["calc"]),
        (ToolCallLimit("search", run_limit=0, enforce=False), {}, ["calc", "search"]),
        (ModelCallLimit(run_limit=1), {"model": (1, 1)}, ["calc", "search"]),
    ],
)
def test_exhausted_tools_are_not_offered(
    limit: Limit | ResolvedLimit, used: Any, offered: list[str]
) -> None:
    """A tool with nothing left in a scope goes, the others stay in order; no note is needed."""
    given = request(asked(), calc, search)
    shown, said = shaped(given, limit, **used)
    assert names(shown) == offered
    assert said is None
    # Other middlewares may hold the request.
    assert names(given) == ["calc", "search"]


def test_tools_of_the_provider_stay() -> None:
    """A tool that runs at the provider cannot be counted, so it is not hidden."""
    shown, said = shaped(request(asked(), search, PROVIDER_TOOL), NOTHING_LEFT)
    assert names(shown) == ["web_search"]
    assert said is None


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


def test_without_tools_to_call_there_is_no_choice() -> None:
    """It would be refused among no tools, and tools that have to stay must not be called."""
    for choice in ["any", "required", "auto", *naming("search")]:
        for history in (asked(), after_a_call()):
            given = request(history, search, tool_choice=choice)
            offered, _ = shaped(given, NO_SEARCH)
            assert offered.tool_choice is last_call(given).tool_choice is None


@pytest.mark.parametrize("tools", [(), (search, calc, PROVIDER_TOOL)], ids=["none", "some"])
def test_the_last_call_says_so(tools: Any) -> None:
    """It offers no tools, not even the provider's, and asks for the answer."""
    given = request(asked(), *tools)
    offered = last_call(given)
    assert offered.tools == []
    assert offered.messages[-1].content == f"How warm is it?\n\n{LAST_CALL}"
    assert (given.tools, given.messages) == ([*tools], asked())


def test_the_last_call_after_other_calls_says_so() -> None:
    """Where the tools have to stay, the words alone say that none may be called."""
    offered = last_call(request(after_a_call(), search, PROVIDER_TOOL))
    assert names(offered) == ["search", "web_search"]
    assert offered.messages[-1].content == f"12\n\n{LAST_CALL}"
    assert [message.type for message in offered.messages] == ["human", "ai", "tool"]


def test_another_state_changes_nothing_else() -> None:
    """The request is the same as LangChain's own way makes it; the first one keeps its state."""
    given = request(after_a_call(), search, state={"messages": []}, tool_choice="auto")
    state: Any = {"messages": [], LEDGER: Ledger(final="")}
    assert with_state(given, state) == given.override(state=state)
    assert given.state == {"messages": []}

"""Inside deepagents: its tools and sub-agents under limits, its reviews, repairs and summaries."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

import pytest
from langchain.agents.middleware import TodoListMiddleware
from langchain_core.messages import AIMessage, BaseMessage, ToolCall
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
    usage,
    with_limits,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.agent.conftest import Form, both_forms
from tests.agent.rules import CONFIG, check_history, recording, tool_limiter
from tests.signals import Signals

# Among the oldest versions there is none.
deepagents = pytest.importorskip("deepagents")


async def turn(agent: Any) -> dict[str, Any]:
    given = {"messages": [("user", "Go!")]}
    return dict(await agent.ainvoke(given, CONFIG))


def call(tool: str) -> ToolCall:
    return ToolCall(name=tool, args={}, id=uuid4().hex, type="tool_call")


@pytest.mark.filterwarnings("ignore:the sub-agents that the tool 'task'")
async def test_an_error(signals: Signals) -> None:
    """What an `error` stopped is refunded, though its calls are answered before our hooks run."""
    ran: list[str] = []
    agent = deepagents.create_deep_agent(
        ScriptedChatModel(script=[["search"] * 3, ["search", "search"], "done"]),
        [recording("search", ran)],
        middleware=[
            tool_limiter(signals, "search", run_limit=2, exit_behavior="error"),
            QuotaMiddleware[Any, Any](
                [ToolCallLimit("search", thread_limit=9)], telemetry=signals.telemetry
            ),
        ],
        checkpointer=InMemorySaver(),
    )

    with pytest.raises(ToolCallLimitExceededError):
        await turn(agent)
    result = await turn(agent)

    assert ran == ["search"] * 2
    assert usage(agent.get_state(CONFIG)).tools == {"search": 2}
    check_history(result["messages"])


@pytest.mark.parametrize("own", ["", "So far: nothing."])
@pytest.mark.parametrize(
    "limit",
    [
        ModelCallLimit(run_limit=2, exit_behavior="finalize"),
        ModelCallLimit(run_limit=2),
        ToolCallLimit("search", run_limit=2, exit_behavior="end"),
    ],
    ids=["finalize", "end of model calls", "end of tools"],
)
async def test_a_sub_agent(limit: Limit, own: str, signals: Signals) -> None:
    """A sub-agent that a limit ends returns a text: the last answer's, or the limit's."""
    ran: list[str] = []
    child = ScriptedChatModel(
        script=lambda messages: AIMessage(own, tool_calls=[call("search"), call("search")])
    )
    agent = deepagents.create_deep_agent(
        ScriptedChatModel(
            script=[[("task", {"description": "Find it!", "subagent_type": "finder"})], "done"]
        ),
        subagents=[
            {
                "name": "finder",
                "description": "Finds.",
                "system_prompt": "Find it.",
                "model": child,
                "tools": [recording("search", ran)],
                "middleware": [QuotaMiddleware([limit], telemetry=signals.telemetry)],
            }
        ],
        checkpointer=InMemorySaver(),
    )

    result = await turn(agent)

    (answer,) = [each for each in result["messages"] if each.type == "tool"]
    if own and limit.exit_behavior == "finalize":
        assert answer.text == own
    else:
        assert "limit" in answer.text
    assert len(ran) == (4 if limit.exit_behavior == "end" and limit.kind == "model" else 2)
    for each in child.calls:
        check_history(each.messages)


TASK = "Find it!"


def task(name: str = "general-purpose") -> tuple[str, dict[str, Any]]:
    return "task", {"description": TASK, "subagent_type": name}


class Deep:
    """A deep agent with limits on one thread, and all that it did.

    Args:
        signals: The telemetry.
        main: What the main agent's model plays in each turn.
        child: What the model of each sub-agent plays.
        limits: The limits of all agents.
        settings: Further arguments of `QuotaMiddleware`.
        profile: What deepagents knows of the model.
        **options: Further arguments of `create_deep_agent`.
    """

    def __init__(  # noqa: PLR0917 - what a test says first
        self,
        signals: Signals,
        main: Sequence[Turn] | Iterator[Turn],
        child: Sequence[Turn],
        limits: Sequence[Limit],
        settings: Mapping[str, Any] | None = None,
        profile: Any = None,
        **options: Any,
    ) -> None:
        self.summaries = 0

        def script(messages: Sequence[BaseMessage]) -> Turn:
            if "extract" in messages[0].text:
                self.summaries += 1
                return "They searched."
            if isinstance(main, Iterator) and TASK not in str(messages):
                return next(main)
            asked = max(index for index, each in enumerate(messages) if each.type == "human")
            said = sum(each.type == "ai" for each in messages[asked:])
            turns = child if TASK in messages[asked].text else [*main]
            return turns[said]

        self.ran: list[str] = []
        self.store = MemoryStore()
        self.model = ScriptedChatModel(script=script, profile=profile)
        quota = QuotaMiddleware[Any, Any](
            limits, store=self.store, telemetry=signals.telemetry, **(settings or {})
        )
        self.agent: Any = with_limits(deepagents.create_deep_agent, quota)(
            self.model,
            [recording("search", self.ran), recording("ask", [], lambda: interrupt("Go on?"))],
            **{"checkpointer": InMemorySaver(), **options},
        )

    async def turn(self, form: Form = "async", given: Any = None) -> dict[str, Any]:
        given = {"messages": [("user", "Go!")]} if given is None else given
        if form == "sync":
            return dict(self.agent.invoke(given, CONFIG))
        return dict(await self.agent.ainvoke(given, CONFIG))

    def used(self, counter: str) -> int:
        """What the store counted for the thread."""
        return {each.key: each.used for each in self.store.usages()}[f"{counter}:thread:thread-1"]

    def check(self) -> None:
        """Assert that every request and the thread are valid histories."""
        for each in self.model.calls:
            check_history(each.messages)
        check_history(self.agent.get_state(CONFIG).values["messages"])

    def answers(self) -> list[tuple[str, str]]:
        messages = self.agent.get_state(CONFIG).values["messages"]
        return [(each.status, each.text) for each in messages if each.type == "tool"]


@pytest.mark.parametrize(("exit_behavior", "started"), [("continue", 2), ("end", 0)])
async def test_refused_tasks(exit_behavior: Any, started: int, signals: Signals) -> None:
    """Of parallel `task` calls those that are refused start no sub-agent, and are answered."""
    deep = Deep(
        signals,
        [[task(), task(), task()], "done"],
        [["search"], "found"],
        [
            ToolCallLimit("task", run_limit=2, exit_behavior=exit_behavior),
            ModelCallLimit(thread_limit=99),
        ],
    )

    await deep.turn()

    statuses = [status for status, _ in deep.answers()]
    assert (statuses.count("success"), statuses.count("error")) == (started, 3 - started)
    assert len(deep.ran) == started
    # Those of the main agent, and two of each sub-agent.
    main = 2 if exit_behavior == "continue" else 1
    assert deep.used("model") == len(deep.model.calls) == main + 2 * started
    deep.check()


@both_forms
async def test_parallel_tasks(form: Form, signals: Signals) -> None:
    """Sub-agents that run at once are counted exactly."""
    tasks = 10
    deep = Deep(
        signals,
        [[task()] * tasks, "done"],
        [["search"] * 3, ["search"] * 3, "found"],
        [ToolCallLimit("search", thread_limit=23), ToolCallLimit("task", thread_limit=tasks)],
    )

    await deep.turn(form)

    assert len(deep.ran) == deep.used("search") == 23
    assert deep.used("task") == tasks
    deep.check()


async def test_all_tools(signals: Signals) -> None:
    """A limit on all tools counts `task` and the file tools, and not what it excludes."""
    counted: list[Any] = [
        task(),
        ("ls", {"path": "/"}),
        ("write_file", {"file_path": "/a.txt", "content": "a"}),
        ("grep", {"pattern": "a"}),
    ]
    todos = ("write_todos", {"todos": [{"content": "Search.", "status": "pending"}]})
    deep = Deep(
        signals,
        [[todos, *counted], [todos, "search", ("read_file", {"file_path": "/a.txt"})], "done"],
        ["found"],
        [ToolCallLimit(run_limit=5, thread_limit=50, exclude=("write_todos",))],
        {"hide_exhausted": True, "tell_model": True},
        middleware=[TodoListMiddleware()],
    )

    await deep.turn()

    assert deep.used("__all__-write_todos") == 5
    (refused,) = [text for status, text in deep.answers() if status == "error"]
    assert refused.startswith("Tool call limit exceeded")
    assert len(deep.answers()) == 8
    assert deep.ran == ["search"]
    *_, last = deep.model.calls
    assert last.tools == ("write_todos",)
    assert "all tools but write_todos: 0 of 5 left" in str(last.messages)
    deep.check()


async def test_a_last_answer(signals: Signals) -> None:
    """With `finalize` the main agent's last request offers no tool, `task` neither."""
    deep = Deep(
        signals,
        [[task()], [task()], "never"],
        [["search"], "found"],
        [ModelCallLimit(run_limit=2, exit_behavior="finalize")],
    )

    result = await deep.turn()

    *_, last = deep.model.calls
    assert "This is the last model call" in str(last.messages)
    assert result["messages"][-1].type == "ai"
    assert not result["messages"][-1].tool_calls
    deep.check()


@both_forms
async def test_an_error_in_a_sub_agent(form: Form, signals: Signals) -> None:
    """It ends the main agent's run with the exception; the next turn goes on, counted exactly."""
    deep = Deep(
        signals,
        [[task()], "done"],
        [["search"], ["search", "search"], "found"],
        [ToolCallLimit("search", run_limit=2, thread_limit=9, exit_behavior="error")],
    )

    for _ in range(2):
        with pytest.raises(ToolCallLimitExceededError):
            await deep.turn(form)

    assert len(deep.ran) == deep.used("search")
    for each in deep.model.calls:
        check_history(each.messages)


async def test_a_review_in_sub_agents(signals: Signals) -> None:
    """Calls of parallel sub-agents wait for a reviewer, and are counted once they are approved."""
    deep = Deep(
        signals,
        [[task(), task()], "done"],
        [["search", "search"], "found"],
        [ToolCallLimit("search", thread_limit=2), ModelCallLimit(thread_limit=6)],
        interrupt_on={"search": True},
    )

    result = await deep.turn()
    assert deep.ran == []
    assert "search:thread:thread-1" not in {each.key for each in deep.store.usages()}
    first, second = result["__interrupt__"]
    review = {
        first.id: {"decisions": [{"type": "approve"}, {"type": "reject"}]},
        second.id: {"decisions": [{"type": "approve"}, {"type": "approve"}]},
    }
    result = await deep.turn(given=Command(resume=review))

    assert "__interrupt__" not in result
    assert len(deep.ran) == deep.used("search") == 2
    assert deep.used("model") == 6 == len(deep.model.calls)
    deep.check()


async def test_a_review_of_tasks(signals: Signals) -> None:
    """A `task` call that the reviewer rejects is not counted."""
    deep = Deep(
        signals,
        [[task(), task(), task()], "done"],
        [["search"], "found"],
        [ToolCallLimit("task", thread_limit=1)],
        interrupt_on={"task": True},
    )

    await deep.turn()
    kinds = ("reject", "approve", "approve")
    await deep.turn(given=Command(resume={"decisions": [{"type": each} for each in kinds]}))

    assert deep.ran == ["search"]
    assert deep.used("task") == 1
    deep.check()


async def test_an_interrupt_of_a_tool_in_a_sub_agent(signals: Signals) -> None:
    """A tool of a sub-agent asks the user; the resume goes on with what was counted."""
    deep = Deep(
        signals,
        [[task()], "done"],
        [["search"], ["ask", "search"], ["search", "search"], "found"],
        [ToolCallLimit("search", run_limit=3, thread_limit=9), ToolCallLimit("ask", run_limit=1)],
    )

    result = await deep.turn()
    assert "__interrupt__" in result
    result = await deep.turn(given=Command(resume="Yes."))

    assert "__interrupt__" not in result
    assert len(deep.ran) == deep.used("search") == 3
    deep.check()


async def test_a_root_run(signals: Signals) -> None:
    """A budget per root run is that of a question: it goes on after reviews in its sub-agents."""
    deep = Deep(
        signals,
        [[task(), task(), "search"], "done"],
        [["search"] * 3, "found"],
        [ToolCallLimit("search", quotas=[Quota(5, per="root_run")])],
        interrupt_on={"search": True},
    )

    for turn in (1, 2):
        result = await deep.turn()
        while interrupts := result.get("__interrupt__"):
            review = {
                each.id: {"decisions": [{"type": "approve"} for _ in each.value["action_requests"]]}
                for each in interrupts
            }
            result = await deep.turn(given=Command(resume=review))
        assert len(deep.ran) == 5 * turn

    deep.check()


async def test_an_answer_of_the_main_agent(signals: Signals) -> None:
    """Sub-agents with a smaller share of the common budget leave the main agent its last call."""
    store = MemoryStore()

    def quota(most: int) -> QuotaMiddleware[Any, Any]:
        limit = ModelCallLimit(quotas=[Quota(most, per="root_run")], exit_behavior="finalize")
        return QuotaMiddleware([limit], store=store, telemetry=signals.telemetry)

    def script(messages: Sequence[BaseMessage]) -> Turn:
        if "This is the last model call" in str(messages):
            return "I give up."
        return ["search"] if TASK in str(messages[1].content) else [task(), task()]

    model = ScriptedChatModel(script=script)
    own = {"name": "general-purpose", "description": "Finds.", "middleware": [quota(6)]}
    agent: Any = with_limits(deepagents.create_deep_agent, quota(8))(
        model, [recording("search", [])], subagents=[own]
    )

    result = await agent.ainvoke({"messages": [("user", "Go!")]}, CONFIG)

    assert result["messages"][-1].text == "I give up."
    assert len(model.calls) == 8


async def test_beside_summaries(signals: Signals) -> None:
    """Summaries are no calls of the agent, and change no count and no budget."""
    long = (AIMessage("So " * 2000, tool_calls=[call("search")]) for _ in range(6))
    turns: list[Turn] = [*long, ["search"], "done"]
    deep = Deep(
        signals,
        iter(turns),
        [],
        [ToolCallLimit("search", thread_limit=6), ModelCallLimit(thread_limit=50)],
        {"tell_model": True},
        profile={"max_input_tokens": 8000},
    )

    await deep.turn()

    assert deep.summaries
    assert len(deep.ran) == deep.used("search") == 6
    assert deep.used("model") == len(deep.model.calls) - deep.summaries == 8
    assert "search: 0 of 6 left" in str(deep.model.calls[-1].messages)
    deep.check()

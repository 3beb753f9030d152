"""Inside deepagents: its tools and sub-agents under limits, its reviews, repairs and summaries."""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest
from langchain.agents.middleware import TodoListMiddleware
from langchain_core.messages import AIMessage, BaseMessage, ToolCall

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    QuotaMiddleware,
    QuotaWarning,
    RepeatLimit,
    ToolCallLimit,
    ToolCallLimitExceededError,
    with_limits,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.scene import Scene, check_history, texts, tool_limiter
from tests.stores import counts, quota
from tests.telemetry import Signals

# Among the oldest versions there is none.
deepagents = pytest.importorskip("deepagents")

CREATE = deepagents.create_deep_agent
TASK = "Find it!"
SPEC = {"description": "Helps.", "system_prompt": "Help."}

bare = pytest.mark.filterwarnings("ignore:the sub-agents that the tool 'task'")
"""Agents whose sub-agents have no limits."""


def task(name: str = "general-purpose") -> tuple[str, dict[str, Any]]:
    return "task", {"description": TASK, "subagent_type": name}


class Deep(Scene):
    """A deep agent that shares limits with its sub-agents, which all play one script."""

    def __init__(
        self, signals: Signals, main: list[Turn], child: list[Turn], *limits: Limit, **options: Any
    ) -> None:
        def script(messages: Sequence[BaseMessage]) -> Turn:
            asked = max(index for index, each in enumerate(messages) if each.type == "human")
            said = sum(each.type == "ai" for each in messages[asked:])
            return (child if TASK in messages[asked].text else main)[said]

        self.store = MemoryStore()
        create = with_limits(CREATE, quota(signals, *limits, store=self.store))
        super().__init__(signals, script, create=create, tools=["search"], **options)

    def charged(self, counter: str) -> int:
        """What the store counted for the thread."""
        return counts(self.store).get(f"{counter}:thread:thread-1", 0)


@bare
async def test_an_error(signals: Signals) -> None:
    """What an `error` stopped is refunded, though its calls are answered before our hooks run."""
    raising = tool_limiter(signals, "search", run_limit=2, exit_behavior="error")
    limits: list[Any] = [raising, ToolCallLimit("search", thread_limit=9, name="thread")]
    scene = Scene(signals, [["search"] * 3, ["search"] * 2, "done"], limits, create=CREATE)
    with pytest.raises(ToolCallLimitExceededError):
        await scene.play()
    result = await scene.play()
    assert scene.ran == ["search"] * 2
    assert scene.usage().tools == {"search": 2}
    check_history(result["messages"])


@pytest.mark.parametrize("own", ["", "So far: nothing."])
@pytest.mark.parametrize(
    "limit",
    [
        ModelCallLimit(run_limit=2, exit_behavior="finalize"),
        ModelCallLimit(run_limit=2),
        ToolCallLimit("search", run_limit=2, exit_behavior="end"),
    ],
)
async def test_a_sub_agent_that_a_limit_ends(limit: Limit, own: str, signals: Signals) -> None:
    """It returns a text: that of its last answer, or the limit's."""

    def script(messages: Sequence[BaseMessage]) -> Turn:
        calls = [ToolCall(name="search", args={}, id=uuid4().hex) for _ in range(2)]
        return AIMessage(own, tool_calls=calls)

    held = QuotaMiddleware[Any, Any]([limit], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=script)
    finder = {"name": "finder", "model": model, "middleware": [held], **SPEC}
    scene = Scene(signals, [[task("finder")], "done"], create=CREATE, subagents=[finder])
    (answer,) = texts(await scene.play())
    assert answer == own if own and limit.exit_behavior == "finalize" else "limit" in answer


async def test_an_error_in_a_sub_agent(signals: Signals) -> None:
    """It ends the main agent's run with the exception; the next run goes on, counted exactly."""
    limit = ToolCallLimit("search", run_limit=2, thread_limit=9, exit_behavior="error")
    child: list[Turn] = [["search"], ["search", "search"], "found"]
    deep = Deep(signals, [[task()], "done"], child, limit)
    for _ in range(2):
        with pytest.raises(ToolCallLimitExceededError):
            await deep.play()
    assert len(deep.ran) == deep.charged("search") == 2
    deep.check_requests()


async def test_a_review_in_sub_agents(signals: Signals) -> None:
    """Calls of parallel sub-agents wait for a reviewer, and are counted once they are approved."""
    limits = ToolCallLimit("search", thread_limit=2), ModelCallLimit(thread_limit=6)
    child: list[Turn] = [["search", "search"], "found"]
    review = {"search": True}
    deep = Deep(signals, [[task(), task()], "done"], child, *limits, interrupt_on=review)
    first, second = (await deep.play())["__interrupt__"]
    assert (deep.ran, deep.charged("search")) == ([], 0)
    yes, no = {"type": "approve"}, {"type": "reject"}
    await deep.resume({first.id: {"decisions": [yes, no]}, second.id: {"decisions": [yes, yes]}})
    assert len(deep.ran) == deep.charged("search") == 2
    assert deep.charged("model") == 6 == len(deep.model.calls)
    deep.check()


@bare
async def test_repetitions(signals: Signals) -> None:
    """Equal calls of its own tools are refused, not those after a change."""
    read, grep = ("read_file", {"file_path": "/a.txt"}), ("grep", {"pattern": "rome"})
    changes: list[Turn] = [[("write_file", {"file_path": "/a.txt", "content": "0"})]]
    for number in range(3):
        change = {"file_path": "/a.txt", "old_string": str(number), "new_string": str(number + 1)}
        changes += [[("edit_file", change)], [read], [grep]]
    missing = ("read_file", {"file_path": "/missing.txt"})
    scripts: dict[str, list[Turn]] = {
        "": changes,
        "write_todos": [[("write_todos", {"todos": []})]] * 3,
        "read_file": [[missing]] * 3,
        "ls": [[("ls", {"path": "/"})]] * 3,
    }
    for tool, script in scripts.items():
        items: list[Any] = [RepeatLimit(2), TodoListMiddleware()]
        result = await Scene(signals, [*script, "done"], items, create=CREATE).play()
        refused = [each for each in result["messages"] if "This call was not run" in each.text]
        assert [each.name for each in refused] == ([tool] if tool else [])


async def test_the_warning(signals: Signals) -> None:
    """The first model call warns, once, of sub-agents without limits; each agent is looked at."""
    limited = QuotaMiddleware[Any, Any]([ModelCallLimit(run_limit=9)], telemetry=signals.telemetry)
    subagents = [{"name": "limited", "middleware": [limited], **SPEC}, {"name": "bare", **SPEC}]

    def scene(*subagents: Any) -> Scene:
        return Scene(signals, ["done"] * 2, [limited], create=CREATE, subagents=subagents)

    for _ in range(2):
        there = scene(*subagents)
        with pytest.warns(QuotaWarning) as caught:
            await there.play()
        (warning,) = caught
        assert str(warning.message) == (
            "the sub-agents that the tool 'task' of agent 'unnamed' starts have no limits of "
            "langchain-quota: 'general-purpose', 'bare'. Give them their parent's limits: "
            "with_limits(create_deep_agent, quota)(…)"
        )
        # Every other warning of a test is an error.
        await there.play()
    await scene({"name": "general-purpose", "middleware": [limited], **SPEC}).play()

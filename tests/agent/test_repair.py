"""Tool calls left without an answer: the next turn gives them one, in their place."""

import pytest
from langchain_core.messages import ToolMessage

from langchain_quota import ToolCallLimitExceededError
from tests.scene import CONFIG, Scene, tool_limiter
from tests.signals import Signals


def kinds(scene: Scene) -> list[str]:
    return [message.type for message in scene.state()["messages"]]


async def test_error(signals: Signals) -> None:
    """`error` leaves its batch open; the next turn answers it behind its message, uncharged."""
    scene = Scene(
        signals,
        [["search", "search", "calc"], "done"],
        [tool_limiter(signals, "search", run_limit=1, exit_behavior="error")],
    )

    with pytest.raises(ToolCallLimitExceededError):
        await scene.play()
    assert kinds(scene) == ["human", "ai"]
    scene.check(answered=False)

    await scene.play()
    assert kinds(scene) == ["human", "ai", "tool", "tool", "tool", "human", "ai"]
    assert scene.answers() == [("search", "error"), ("search", "error"), ("calc", "error")]
    assert scene.ran == []
    scene.check()


async def test_several_open_batches(signals: Signals) -> None:
    """Open calls of several turns before ours was installed: each is answered in its place."""
    scene = Scene(signals, ["done"], [tool_limiter(signals, thread_limit=2)])
    call = {"args": {}, "type": "tool_call"}
    scene.agent.update_state(
        CONFIG,
        {
            "messages": [
                {"role": "user", "content": "one"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {**call, "name": "search", "id": "a"},
                        {**call, "name": "calc", "id": "b"},
                    ],
                },
                ToolMessage("found", tool_call_id="b", name="calc"),
                {"role": "user", "content": "two"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{**call, "name": "search", "id": "a"}],
                },
            ]
        },
        as_node="model",
    )

    await scene.play()

    assert kinds(scene) == ["human", "ai", "tool", "tool", "human", "ai", "tool", "human", "ai"]
    scene.check()

"""Agents inside the tools of agents, and limits that nothing can remember.

Where a warning points: at the user's line that made what warns.
"""

import warnings
from functools import partial
from typing import Any

import pytest
from langgraph.prebuilt import create_react_agent

from langchain_quota import (
    GraphQuota,
    MemoryStore,
    ModelCallLimit,
    QuotaMiddleware,
    QuotaWarning,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form, Scene, asking, both_forms, delegate, tool_limiter
from tests.telemetry import Signals

SEARCHES = asking("search", "search")


@pytest.mark.parametrize("remedy", ["none", "store", "checkpointer"])
async def test_a_childs_thread_limit(remedy: str, signals: Signals) -> None:
    """It lasts one invocation, and warns once; a store, or `checkpointer=True`, make it hold."""
    child = Scene(
        signals,
        SEARCHES,
        [ToolCallLimit("search", thread_limit=1 if remedy == "none" else 3)],
        store=MemoryStore() if remedy == "store" else None,
        checkpointer=True if remedy == "checkpointer" else None,
    )
    limiter = tool_limiter(signals, thread_limit=9)
    script = [["delegate"], ["delegate"], "done"]
    scene = Scene(signals, script, [limiter], tools=[delegate(child.agent)])
    if remedy == "none":
        with pytest.warns(QuotaWarning, match="thread limit") as caught:
            await scene.play()
        assert len(caught) == 1
        assert child.ran == ["search"] * 2
    else:
        # Every warning of a test is an error.
        await scene.play()
        assert child.ran == ["search"] * 3
    assert scene.state()["thread_tool_call_count"] == {"__all__": 2}


# Under `invoke` a tool runs in another thread, in a copy of the context.
@both_forms
@pytest.mark.parametrize("name", [None, "researcher"])
async def test_a_childs_series(name: str | None, form: Form, signals: Signals) -> None:
    """A named child writes thread series; an unnamed one has its parent's name, and does not."""
    limits: list[Limit] = [
        ToolCallLimit("search", run_limit=9),
        ToolCallLimit("search", thread_limit=9, name="child"),
        ModelCallLimit(thread_limit=9, name="child model"),
    ]
    child = Scene(signals, SEARCHES, limits, name=name, checkpointer=None)
    limiter = tool_limiter(signals, thread_limit=9)
    options: dict[str, Any] = {"tools": [delegate(child.agent)], "name": "boss", "form": form}
    with pytest.warns(QuotaWarning):
        await Scene(signals, [["delegate"], "done"], [limiter], **options).play()
    series, thread = "langchain_quota_thread_used", "thread-1"
    assert signals.samples(series, limit="tool:*") == {("boss", thread): 1}
    for limit in ("child", "child model"):
        assert signals.samples(series, limit=limit) == ({(name, thread): 2} if name else {})


FORGETFUL = ToolCallLimit("search", thread_limit=9)
MAKES: list[Any] = [
    lambda telemetry: QuotaMiddleware[Any, Any]([FORGETFUL], telemetry=telemetry),
    lambda telemetry: QuotaMiddleware([TokenLimit(run_limit=999)], telemetry=telemetry),
    lambda telemetry: GraphQuota([FORGETFUL], telemetry=telemetry),
]


@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
@pytest.mark.parametrize("make", MAKES, ids=["generic", "budget", "graph"])
async def test_of_a_middleware(make: Any, signals: Signals) -> None:
    """A thread limit that is forgotten, and tokens that are not reported: it is made there.

    It is shown once, and who filters warnings by module names their own.
    """
    with warnings.catch_warnings(record=True) as concurrency:
        warnings.simplefilter("default")
        limits = make(signals.telemetry)
    model = ScriptedChatModel(script=["A short answer."] * 3)
    if isinstance(limits, GraphQuota):
        agent: Any = create_react_agent(limits.model(model), limits.tools([]))
    else:
        agent = Scene(signals, model, [limits], checkpointer=None).agent
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=__name__)
        for _ in range(2):
            await agent.ainvoke({"messages": [("user", "hi")]})
    # That of a graph without a store is known at once, and then there is no thread to count by.
    assert len(concurrency) == isinstance(limits, GraphQuota)
    (warning,) = [*concurrency, *caught][:1]
    assert warning.category is QuotaWarning
    assert (warning.filename, warning.lineno) == (__file__, make.__code__.co_firstlineno)


def test_code_without_a_module(signals: Signals) -> None:
    """Code that was never imported, as templates and consoles run it, has its line, too."""
    namespace: dict[str, Any] = {"make": partial(QuotaMiddleware, telemetry=signals.telemetry)}
    namespace["limits"] = [FORGETFUL]
    exec(compile("\n\nquota = make(limits)", "<console>", "exec"), namespace)  # noqa: S102 - as they do
    agent = Scene(signals, ["hi"], [namespace["quota"]], checkpointer=None).agent
    with pytest.warns(QuotaWarning, match="checkpointer") as caught:
        agent.invoke({"messages": [("user", "hi")]})
    (warning,) = caught
    assert (warning.filename, warning.lineno) == ("<console>", 3)

"""Where a warning points: at the user's line that made what warns."""

import warnings
from functools import partial
from typing import Any

import pytest
from langgraph.prebuilt import create_react_agent

from langchain_quota import GraphQuota, QuotaMiddleware, QuotaWarning, TokenLimit, ToolCallLimit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Scene
from tests.telemetry import Signals

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

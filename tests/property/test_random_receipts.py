"""Random trees of agents: a receipt has what their models and tools say themselves."""

import asyncio
from collections import Counter
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt

from langchain_quota import CostLimit, QuotaMiddleware
from tests.examples import DEPTH
from tests.property.test_trees import UNKNOWN, WAYS, Shape, built, shapes
from tests.scene import Form
from tests.telemetry import telling
from tests.trees import ASKED, PER_TOKEN, Billed, config, price

UNSEEN = (*UNKNOWN, "thread, run", "thread, callbacks", "thread, metadata")
"""The ways that pass on neither the context nor the callbacks of a run."""
AS_CALLER = ("chain", "config", "run, config", "thread, config")
"""The ways in which LangChain gives an agent the name of its caller."""


def is_named(shape: Shape) -> bool:
    """Whether each agent of a tree runs under its own name, and not that of its caller."""
    return all(
        way not in AS_CALLER and not child.hands_over and is_named(child)
        for way, child in shape.below
    )


@pytest.mark.timeout(3600)
@settings(max_examples=24 if DEPTH == "quick" else 1000)
@given(
    shape=shapes(3, [way for way in WAYS if way not in UNSEEN]),
    most=st.integers(0, 6),
    limited=st.lists(st.sampled_from(["search", "meters", "calls", "none"]), min_size=1),
    form=st.sampled_from(["sync", "async"]),
    asks=st.booleans(),
)
async def test_any_tree(
    shape: Shape, most: int, limited: list[str], form: Form, *, asks: bool
) -> None:
    """Calls, tokens, dollars and refusals are those of the models and tools, over an interrupt."""
    tree = Billed(telling(spans="off").telemetry, most, limited=limited)
    person = StructuredTool.from_function(
        lambda: tree.started.append(interrupt("May I?")), name="human", description="Ask."
    )
    top = tree.agent(0, *([person] if asks else []), checkpointer=InMemorySaver())
    inner = built(tree, shape)
    quota = QuotaMiddleware(
        [CostLimit(enforce=False)], prices=price, telemetry=telling(spans="off").telemetry
    )
    with quota.receipt() as bill:
        runs = [(inner, ASKED, None), (top, ASKED, config())]
        for agent, asked, where in [*runs, *([(top, Command(resume="yes"), config())] * asks)]:
            if form == "sync":
                await asyncio.to_thread(agent.invoke, asked, where)
            else:
                await agent.ainvoke(asked, where)
    models = bill.total("model")
    assert models.calls == tree.calls.total()
    assert models.total_tokens == tree.tokens.total()
    if is_named(shape):
        lines = [each for each in bill.lines if each.kind == "model"]
        assert {each.agent: each.calls for each in lines} == tree.calls
        assert {each.agent: each.total_tokens for each in lines} == tree.tokens
    assert models.input_tokens == tree.tokens.total() - tree.calls.total()
    assert bill.dollars == Decimal(tree.tokens.total() * PER_TOKEN) / 10**9
    ran = Counter({each.name: 0 for each in bill.lines if each.kind == "tool"})
    for each in bill.lines:
        ran[each.name] += each.calls if each.kind == "tool" else 0
    started = Counter("human" if each == "yes" else each for each in [*tree.ran, *tree.started])
    assert +ran == started
    assert sum(bill.total("tool").blocked.values()) == tree.asked - len(tree.ran)
    assert (bill.runs, bill.ended_by) == (2, [])

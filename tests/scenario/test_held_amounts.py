"""What is held for a model call that is made again, refused by its bound, or the last one."""

from typing import Any

import pytest

from langchain_quota import MemoryStore, ModelCallLimit, Quota, TokenLimit
from langchain_quota.core.decision import Outcome
from langchain_quota.limits import Limit
from langchain_quota.testing import captured_decisions
from tests.scene import Kind, Scene
from tests.stores import counts
from tests.telemetry import Signals
from tests.tokens import GLOBAL, RETRY, TOTAL, During, ProviderError, answer, either, spent

RESERVES = pytest.mark.parametrize("reserve", [50, lambda _: 50], ids=["number", "function"])


def limit_of(most: int, reserve: Any, **options: Any) -> TokenLimit:
    return TokenLimit(quotas=[Quota(most, per="global")], reserve=reserve, **options)


@either
@RESERVES
@pytest.mark.parametrize(("order", "seen"), [("around", [50, 110]), ("inside", [50, 50])])
async def test_a_retry_holds_its_own_amount(
    signals: Signals, kind: Kind, reserve: Any, order: str, seen: list[int]
) -> None:
    """Behind a middleware that retries, each attempt holds its reserve, and is charged."""
    store, when_paid, limit = MemoryStore(), list[int](), limit_of(1000, reserve)

    def paid() -> None:
        when_paid.append(counts(store).get(GLOBAL, 0))
        if len(when_paid) == 1:
            raise ProviderError

    around: list[Any] = [RETRY, limit] if order == "around" else [limit, RETRY]
    items = [*around, During(paid)]
    scene = Scene(signals, [answer(60), answer(40)], items, kind=kind, store=store)
    await scene.play()
    assert when_paid == seen
    assert counts(store) == {GLOBAL: 100}
    assert dict(scene.usage().run_spent) == {TOTAL: 100}
    assert scene.state()["langchain_quota"]["counts"]["thread_model"] == 1


@either
@pytest.mark.parametrize(("most", "calls"), [(50, 1), (61, 2)])
async def test_a_retry_is_checked_with_what_its_first_attempt_used(
    signals: Signals, kind: Kind, most: int, calls: int
) -> None:
    """Without a reserve, too, a call is made again only if the attempt before it left anything."""
    failures = [ProviderError()]

    def fail() -> None:
        if failures:
            raise failures.pop()

    items: list[Any] = [RETRY, TokenLimit(run_limit=most), During(fail)]
    scene = Scene(signals, [answer(60), answer(40)], items, kind=kind)
    await scene.play()
    assert len(scene.model.calls) == calls
    assert spent(scene)[1] == (60 if calls == 1 else 100)


@either
@pytest.mark.parametrize("shared", [False, True])
async def test_a_call_that_its_bound_refuses_is_not_counted(
    signals: Signals, kind: Kind, *, shared: bool
) -> None:
    """A call that its bound refuses is one decision, and counts nowhere as a call."""
    store, bounds = MemoryStore(), [10, 200]
    quotas = [Quota(5, per="global")] if shared else []
    limits: list[Limit] = [
        ModelCallLimit(run_limit=5, thread_limit=5, quotas=quotas),
        limit_of(100, lambda _: bounds.pop(0)),
    ]
    scene = Scene(signals, [answer(60, "search")], limits, kind=kind, store=store)
    with captured_decisions() as decisions:
        await scene.play()
    models = [each.outcome for each in decisions if each.call.kind == "model"]
    assert models == [Outcome.ALLOWED, Outcome.BLOCKED]
    assert scene.used(limits[0]) == (1, 1)
    calls = {"model:thread:thread-1": 1, **({"model:global:": 1} if shared else {})}
    assert counts(store) == {GLOBAL: 60, **calls}
    assert scene.last_text() == (
        "Token limits exceeded: global limit (60/100 tokens, the call may need 200)"
    )


@either
async def test_a_call_with_a_reserve_is_told_with_the_counts_before_it(
    signals: Signals, kind: Kind
) -> None:
    """The last call that a limit admits is allowed, though it is told when it is counted."""
    limits: list[Limit] = [ModelCallLimit(run_limit=1, thread_limit=1), limit_of(100, 10)]
    scene = Scene(signals, [answer(5)], limits, kind=kind, store=MemoryStore())
    with captured_decisions() as decisions:
        await scene.play()
    (told,) = (each for each in decisions if each.call.kind == "model")
    assert told.outcome is Outcome.ALLOWED
    assert ("run", 0, 1) in [count[:3] for count in told.limits[0].counts]


@either
@pytest.mark.parametrize("shared", [False, True])
async def test_a_call_that_does_not_fit_is_the_last_one(
    signals: Signals, kind: Kind, *, shared: bool
) -> None:
    """With `"finalize"` a call that its bound refuses is made as the last one, if that fits."""
    store = MemoryStore() if shared else None
    limit = TokenLimit(
        run_limit=50,
        quotas=[Quota(50, per="global")] if shared else [],
        # The tools are a part of what a call can use: the last one has none.
        reserve=lambda request: 60 if request.tools else 40,
        exit_behavior="finalize",
        keep=20,
    )
    scene = Scene(signals, [answer(35, "search", text="")], [limit], kind=kind, store=store)
    await scene.play()
    (call,) = scene.model.calls
    assert "last model call" in call.messages[-1].text
    assert call.tools == ()
    # It asks for a tool all the same.
    assert "run limit (0/50 tokens, the rest was kept for the last answer)" in scene.last_text()
    assert store is None or counts(store) == {GLOBAL: 35}

"""A reserve that is computed for one call, and never fits: the call is refused as any other is."""

from itertools import chain, repeat
from typing import Any

import pytest

from langchain_quota import MemoryStore, ModelCallLimitExceededError, ModelUsage, Quota, TokenLimit
from tests.scene import Scene
from tests.stores import counts
from tests.telemetry import Signals
from tests.tokens import answer

NEEDS = "the call may need 2000"


@pytest.mark.parametrize("quota", [{"burst": 100}, {}, {"smooth": False}])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, NEEDS),
        ({"wait": "10h"}, NEEDS),
        ({"exit_behavior": "error"}, NEEDS),
        ({"exit_behavior": "error", "wait": "10h"}, NEEDS),
        ({"exit_behavior": "finalize", "keep": 50}, "A short answer."),
    ],
)
async def test_exit_behavior_decides(signals: Signals, options: Any, said: str, quota: Any) -> None:
    """It ends the run, raises, or is made without tools if that fits; it does not wait in vain."""
    smooth = Quota(1_000, **{"per": "global", "window": "1h", "smooth": True, **quota})
    reserves = chain((50, 2_000), repeat(50 if "keep" in options else 2_000))
    limit = TokenLimit(quotas=[smooth], reserve=lambda _: next(reserves), **options)
    store, script = MemoryStore(), [answer(40, "search"), answer(20, text="A short answer.")]
    scene = Scene(signals, script, [limit], store=store)
    if options.get("exit_behavior") == "error":
        with pytest.raises(ModelCallLimitExceededError, match=said):
            await scene.play()
    else:
        await scene.play()
        assert said in scene.last_text()
    assert len(scene.model.calls) == 1 + (said != NEEDS)
    assert sum(counts(store).values()) <= 60


async def test_a_reserve_of_parts(signals: Signals) -> None:
    """A reserve whose total is not given is its input and its output."""
    parts = ModelUsage(input_tokens=60, output_tokens=50)
    scene = Scene(signals, [answer(10)], [TokenLimit(run_limit=100, reserve=lambda _: parts)])
    await scene.play()
    assert "the call may need 110" in scene.last_text()
    assert ModelUsage(input_tokens=1, total_tokens=9).total_tokens == 9

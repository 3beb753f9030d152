"""Decision models of LangChain 1.5, which answer middlewares: what sees these calls."""

from decimal import Decimal
from typing import Any

import pytest

from langchain_quota import CostLimit, ModelCallLimit, TokenLimit, ToolCallLimit
from langchain_quota.errors import UnknownPriceError
from langchain_quota.limits.call import ModelUsage
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form, Scene, both_forms
from tests.telemetry import Signals, telling
from tests.tokens import During, answer, spent

# LangChain 1.5 has them, which needs langchain-core 1.8.
decisions = pytest.importorskip("langchain_core.decisions")
middlewares: Any = pytest.importorskip("langchain.agents.middleware")

pytestmark = [
    pytest.mark.skipif(
        not hasattr(middlewares, "AutoModeMiddleware"), reason="needs langchain 1.5"
    ),
    pytest.mark.filterwarnings("ignore:The middleware `ModelRouterMiddleware` is in beta"),
]
OTHER = ScriptedChatModel(script=lambda _: answer(7))


class Decider(decisions.BaseDecisionModel):  # type: ignore[misc, name-defined]
    """Chooses the first label, and finds a call as risky as it is told; each answer: 30 tokens."""

    model: str = "decider-1"
    reports: bool = True
    risk: float = 0.1
    asks: Any = None

    @property
    def _provider(self) -> str:
        return "acme"

    def _classify(self, state: Any, questions: Any) -> Any:
        if self.asks is not None:
            self.asks.invoke("Which one?")
        answers: dict[str, Any] = {}
        for name, question in questions.items():
            answers[name] = {"type": "noul", "noul": self.risk}
            if question.type == "choice":
                label = next(iter(question.criteria))
                chosen = {"choice": label, "probabilities": {label: 1.0}, "confidence": 1.0}
                answers[name] = {"type": "choice", **chosen}
        usage = {"input_tokens": 20, "output_tokens": 10} if self.reports else None
        return decisions.ClassifierResponse(model=self.model, answers=answers, usage=usage)


def scene_of(signals: Signals, decider: Any, *limits: Any, **options: Any) -> Scene:
    """An agent whose middlewares ask a decision model: once for the run, and once for its call."""
    model = ScriptedChatModel(script=[answer(100, "search", text=""), answer(100, text="done")])
    choices = {"small": middlewares.ModelChoice(model=model, criteria="Everything.")}
    router = middlewares.ModelRouterMiddleware(
        choices=choices, instructions="Choose.", classifier=decider
    )
    auto = middlewares.AutoModeMiddleware(tools=["search"], classifier=decider)
    return Scene(signals, model, [*limits, router, auto], **options)


async def test_the_count_of_unchecked_calls() -> None:
    """Each call of a decision model is counted as a model call that no limit checks."""
    signals = telling(count_unchecked_calls=True)
    limits = [ModelCallLimit(run_limit=9), ToolCallLimit(run_limit=9)]
    scene = await scene_of(signals, Decider(), *limits, name="boss").played()
    assert scene.ran == ["search"]
    counted = "langchain_quota_unchecked_calls_total"
    assert signals.value(counted, agent="boss", kind="model") == 2


@pytest.mark.filterwarnings("ignore:model 'decider-1' reports no usage")
@both_forms
@pytest.mark.parametrize(
    ("decider", "whole", "limit", "least", "most"),
    [
        pytest.param({}, False, 10_000, 200, 200, id="a budget of the agent's own model"),
        pytest.param({}, True, 10_000, 260, 260, id="a budget of all models"),
        pytest.param({}, True, 150, 160, 160, id="a refusal before the second model call"),
        pytest.param({"reports": False}, True, 10_000, 201, 999, id="an estimate"),
        pytest.param({"asks": OTHER}, True, 10_000, 214, 214, id="asks"),
    ],
)
async def test_what_a_decision_uses(
    signals: Signals, form: Form, decider: Any, *, whole: bool, limit: int, least: int, most: int
) -> None:
    """A budget of all models is charged what is reported or estimated, or what it asks, once."""
    limits, options = [TokenLimit(run_limit=limit)], {"charge_all_models": whole}
    scene = scene_of(signals, Decider(**decider), *limits, form=form, **options)
    assert least <= spent(await scene.played())[1] <= most


def decide() -> None:
    question = decisions.Noul(instructions="Is it hard?")
    Decider().invoke({"state": "It is.", "questions": {"hard": question}})


async def test_within_the_agents_call(signals: Signals) -> None:
    """Even without `charge_all_models`, what is used within the agent's own call is charged."""

    def prices(usage: ModelUsage) -> Decimal | None:
        return None if "decider-1" in usage.models else Decimal(1)

    asks = During(decide, before=True)
    scene = Scene(signals, [answer(100)], [TokenLimit(run_limit=10_000), asks])
    assert spent(await scene.played())[1] == 100 + 30
    # Without a price it is refused.
    scene = Scene(signals, [answer(100)], [CostLimit(run_limit="10"), asks], prices=prices)
    with pytest.raises(UnknownPriceError, match="decider-1"):
        await scene.play()


async def test_a_call_that_is_found_risky(signals: Signals) -> None:
    """A tool call that `AutoModeMiddleware` blocks was allowed before, and counts."""
    limit = ToolCallLimit("search", run_limit=5)
    scene = await scene_of(signals, Decider(risk=0.9), limit).played()
    assert scene.ran == []
    assert scene.usage().run_tools == {"search": 1}

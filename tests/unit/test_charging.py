"""What is remembered of models between calls, without an agent."""

from decimal import Decimal

from prometheus_client import CollectorRegistry

from langchain_quota import CostLimit, ModelUsage, Telemetry
from langchain_quota.middleware._charging import MOST_KNOWN, Charging
from langchain_quota.telemetry import recorder_of


def test_models_with_a_price_are_bounded() -> None:
    """A model's price is looked up once, and the number of remembered models is bounded."""
    asked: list[str] = []

    def price(usage: ModelUsage) -> Decimal:
        asked.append(usage.request_model)
        return Decimal(1)

    recorder = recorder_of(Telemetry(registry=CollectorRegistry()))
    charging = Charging(
        [CostLimit(run_limit=1)], prices=price, allow_unknown=False, recorder=recorder
    )
    names = [f"invented-{index}" for index in range(2 * MOST_KNOWN + 1)]
    for name in names:
        for _ in range(2):
            charging.check_price(ModelUsage(request_model=name), lambda: "boss")
    assert asked == names
    assert len(charging._known) <= MOST_KNOWN

"""Amounts as people and telemetry read them: calls, tokens and US dollars."""

from langchain_quota.decision import Unit
from langchain_quota.money import MICRODOLLARS, as_dollars

UNIT_LABELS: dict[Unit, str] = {"calls": "calls", "tokens": "tokens", "microdollars": "dollars"}
"""The names of units where amounts are shown."""


def in_base_unit(amount: int, unit: Unit) -> float:
    """An amount for metrics, spans and log records: microdollars become dollars."""
    return amount / MICRODOLLARS if unit == "microdollars" else amount


def shown(amount: int | None, unit: Unit) -> str:
    """An amount as people read it: `"3"`, `"1,200 tokens"`, `"$0.50"`."""
    if amount is None or unit == "calls":
        return str(amount)
    return as_dollars(amount) if unit == "microdollars" else f"{amount:,} tokens"

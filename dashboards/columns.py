"""The columns that tables of more than one dashboard have."""

from collections.abc import Callable

from dashboards.panels import Column, Properties, duration, gauge, state, when
from dashboards.queries import thread_link, traces_link, with_traced
from dashboards.usage import Usage

LINKS = [
    {"title": "This thread", "url": thread_link()},
    {"title": "Its calls in Tempo", "url": traces_link(), "targetBlank": True},
]
"""Where a thread in a table leads."""


Ask = Callable[[Usage], str]
"""What is asked of the use of limits."""


def use_columns(
    of: Callable[[Ask], str],
    *,
    traced: bool = False,
    amounts: Properties | None = None,
    amounts_of: Callable[[Ask], str] | None = None,
) -> list[Column]:
    """What tables say of the use of limits.

    Args:
        of: Asks it of those that the table is about.
        traced: Whether the rows lead to traces.
        amounts: What the columns with amounts have of their own; calls by default.
        amounts_of: Asks it of limits that count one unit, if the table is about more.
    """
    share_of, amount = of(lambda use: use.share), amounts_of or of
    of_amounts = {"custom.width": 65, **(amounts or {})}
    return [
        state("State", of(lambda use: use.state), 90),
        gauge("Utilization", with_traced(share_of) if traced else share_of, 140),
        Column("Used", amount(lambda use: use.used), of_amounts),
        Column("Left", amount(lambda use: use.remaining), of_amounts),
        duration("Time to exhaustion", of(lambda use: use.seconds_left), 130),
        when("Resets", of(lambda use: use.resets), 110),
    ]

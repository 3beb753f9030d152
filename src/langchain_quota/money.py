"""Money: US dollars as users write them; counted in microdollars, millionths of a dollar."""

from decimal import Decimal, DecimalException
from fractions import Fraction
from math import ceil

Dollars = Decimal | str | int
"""An amount of US dollars, exactly; never a float, which cannot hold most of them."""

MICRODOLLARS = 10**6
"""How many microdollars make a dollar."""

_MOST = 10**9
"""The most dollars of a limit: Redis adds in Lua, exactly up to 2 ** 53 microdollars."""


def checked_dollars(argument: str, value: object) -> Decimal:
    """An amount of dollars, exactly as it is written; from 0 to a billion."""
    if isinstance(value, float):
        raise TypeError(
            f"{argument} must not be a float, which holds {value!r} only nearly: "
            f'write it as a string, "{value}"'
        )
    if isinstance(value, bool) or not isinstance(value, Decimal | str | int):
        raise TypeError(
            f"{argument} must be dollars as a string, a Decimal or a whole number, not {value!r}"
        )
    try:
        dollars = Decimal(value)
    except DecimalException:
        raise ValueError(
            f'{argument} must be dollars in digits, such as "0.50", not {value!r}'
        ) from None
    if not dollars.is_finite() or not 0 <= dollars <= _MOST:
        raise ValueError(f"{argument} must be from 0 to {_MOST} dollars, not {value!r}")
    return dollars


def checked_microdollars(argument: str, value: object) -> int:
    """The microdollars of an amount of dollars."""
    # The application's decimal context may round decimals; fractions are never rounded.
    amount = Fraction(checked_dollars(argument, value)) * MICRODOLLARS
    if amount.denominator != 1:
        raise ValueError(f"{argument} must have at most six decimal places, not {value!r}")
    return int(amount)


def microdollars(dollars: Decimal) -> int:
    """The microdollars of a price, rounded up to a whole one."""
    return ceil(Fraction(dollars) * MICRODOLLARS)


def as_dollars(amount: int) -> str:
    """An amount of microdollars as people read it: `"$0.50"`, with up to six decimal places."""
    whole, rest = divmod(abs(amount), MICRODOLLARS)
    places = f"{rest:06d}".rstrip("0").ljust(2, "0")
    return f"{'-' if amount < 0 else ''}${whole:,}.{places}"

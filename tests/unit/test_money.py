"""Money: what is taken for dollars, exactly, and how it is shown."""

from decimal import Decimal, localcontext
from typing import Any

import pytest

from langchain_quota.money import as_dollars, checked_dollars, checked_microdollars, microdollars


@pytest.mark.parametrize(
    ("value", "amount"),
    [
        ("0.50", 500_000),
        (Decimal("0.000001"), 1),
        (5, 5_000_000),
        ("0", 0),
        ("1e3", 1_000_000_000),
        (10**9, 10**15),
    ],
)
def test_dollars_are_whole_microdollars(value: Any, amount: int) -> None:
    """Strings, decimals and whole numbers of dollars become millionths, exactly."""
    assert checked_microdollars("run_limit", value) == amount


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0.5, TypeError, 'must not be a float, which holds 0.5 only nearly: .* string, "0.5"'),
        (True, TypeError, "run_limit must be dollars as a string, .* not True"),
        (None, TypeError, "not None"),
        ("$5", ValueError, r"""in digits, such as "0.50", not '\$5'"""),
        ("", ValueError, "in digits"),
        ("-1", ValueError, "from 0 to 1000000000 dollars, not '-1'"),
        (Decimal("NaN"), ValueError, "from 0 to"),
        ("Infinity", ValueError, "from 0 to"),
        (10**9 + 1, ValueError, "from 0 to"),
        ("0.0000001", ValueError, "at most six decimal places, not '0.0000001'"),
    ],
)
def test_other_values_are_refused(value: Any, error: type[Exception], text: str) -> None:
    """What is no amount of dollars is refused by name, with what to write."""
    with pytest.raises(error, match=text):
        checked_microdollars("run_limit", value)


def test_prices_may_be_finer() -> None:
    """A price per million tokens is no amount that is counted: it may have more places."""
    assert checked_dollars("input", "0.00000012") == Decimal("0.00000012")


def test_a_part_of_a_microdollar_is_rounded_up() -> None:
    """What is paid is never less than what it costs."""
    assert microdollars(Decimal("0.0000011")) == 2
    assert microdollars(Decimal("0.000001")) == 1
    assert microdollars(Decimal(0)) == 0


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "$0.00"),
        (500_000, "$0.50"),
        (4_125, "$0.004125"),
        (1_234_500_000, "$1,234.50"),
        (-20_000, "-$0.02"),
    ],
)
def test_dollars_are_shown(amount: int, text: str) -> None:
    """At least cents are shown, and no place that says nothing."""
    assert as_dollars(amount) == text


def test_amounts_do_not_depend_on_the_decimal_context() -> None:
    """An application may compute with few digits: our amounts stay exact."""
    with localcontext(prec=3):
        assert checked_microdollars("run_limit", "1234.567891") == 1_234_567_891
        assert microdollars(Decimal("1.2345671")) == 1_234_568
    with pytest.raises(ValueError, match="at most six decimal places"):
        checked_microdollars("run_limit", "1." + "0" * 60 + "1")

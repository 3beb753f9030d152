"""Money: what is taken for dollars, exactly, and how it is shown."""

from decimal import Decimal
from typing import Any

import pytest

from langchain_quota.money import checked_microdollars


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

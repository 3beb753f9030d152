"""The user's line that a warning points at."""

import warnings

import pytest

from langchain_quota import QuotaWarning
from langchain_quota.user_line import UserLine


def test_a_warning_has_the_line() -> None:
    """It is shown as one of the line's module, once for each text."""
    line = UserLine.of_caller()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for text in ("first", "first", "second"):
            line.warn(text)

    assert [str(each.message) for each in caught] == ["first", "second"]
    assert {(each.category, each.filename, each.lineno) for each in caught} == {
        (QuotaWarning, __file__, test_a_warning_has_the_line.__code__.co_firstlineno + 2)
    }


def test_a_filter_can_name_the_users_module() -> None:
    """Who filters by module names their own."""
    line = UserLine.of_caller()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module=__name__)
        line.warn("not shown")
        with pytest.raises(QuotaWarning, match="shown"):
            line._replace(module="another").warn("shown")


def test_code_without_a_module_has_a_line() -> None:
    """Code that was never imported, as templates and consoles run it, has its line, too."""
    namespace: dict[str, object] = {"of_caller": UserLine.of_caller}
    exec(compile("\n\nline = of_caller()", "<console>", "exec"), namespace)  # noqa: S102 - as they do
    line = namespace["line"]
    assert isinstance(line, UserLine)
    assert line[:2] == ("<console>", 3)
    with pytest.warns(QuotaWarning, match="shown"):
        line.warn("shown")

"""The command line's arguments, and the numbers and pictures of the demo."""

from dataclasses import replace

import pytest

from langchain_quota import Call, Decision, ModelCallLimit, ToolCallLimit
from langchain_quota.cli import main
from langchain_quota.cli.demo import prevented
from langchain_quota.cli.demo_view import Row, View
from langchain_quota.limits import Limit
from tests.judged import Used, judge

SEARCH = ToolCallLimit("search", thread_limit=5, run_limit=3)
MODEL = ModelCallLimit(thread_limit=4)


def search(number: int, thread: str = "ann") -> Call:
    return Call("tool", "search", f"call-{number}", thread_id=thread)


def decide(limit: Limit, used: int, *calls: Call) -> tuple[Decision, ...]:
    return judge([limit], {limit.counter: Used(used, 0)}, calls).decisions


def row(thread: str = "ann", used: int = 3, last_refusal: str = "") -> Row:
    return Row(thread, {"tool:search": used}, {"tool:search": 8}, used, 1, last_refusal)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--threads", "0"),
        ("--threads", "101"),
        ("--threads", "many"),
        ("--seconds", "0"),
        ("--seconds", "-1"),
        ("--seconds", "1.5"),
        ("--port", "70000"),
        ("--port", "-1"),
    ],
)
def test_wrong_value(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A value out of bounds is refused with code 2, naming the option and the value."""
    with pytest.raises(SystemExit) as ended:
        main(["demo", option, value])
    assert ended.value.code == 2
    reason = capsys.readouterr().err.splitlines()[-1]
    assert option in reason
    assert repr(value) in reason


def test_decisions_make_a_row() -> None:
    """Decisions give a thread's use of each limit, its allowed and blocked calls."""
    names = ("tool:search", "tool:*", "model")
    ann = Row("ann", dict.fromkeys(names, 0), dict.fromkeys(names, 5))
    for decision in (
        *decide(SEARCH, 0, *(search(number) for number in range(4))),
        *decide(MODEL, 3, Call("model", thread_id="ann")),
    ):
        ann.take(decision)
    assert ann.used == {"tool:search": 3, "tool:*": 0, "model": 4}
    assert (ann.allowed, ann.blocked, ann.last_refusal) == (4, 1, "search (run)")


def test_a_raised_limit_is_shown() -> None:
    """A thread that was granted more has the raised limit in its row."""
    ann = Row("ann", {"tool:search": 0}, {"tool:search": 5})
    for decision in decide(SEARCH, 5, search(1)):
        raised = [replace(status, thread_limit=8) for status in decision.limits]
        ann.take(replace(decision, limits=tuple(raised)))
    assert ann.most == {"tool:search": 8}


@pytest.mark.parametrize(
    ("blocked", "sentence"),
    [
        ((0, 0), "No thread asked for a call over its limits."),
        ((0, 1), "bob asked for 1 call over its limits; none ran."),
        ((12, 3), "ann asked for 12 calls over its limits; none ran."),
    ],
)
def test_what_was_prevented(blocked: tuple[int, int], sentence: str) -> None:
    """One sentence names the thread with most refused calls, and how many they were."""
    rows = [replace(row(name), blocked=n) for name, n in zip(("ann", "bob"), blocked, strict=True)]
    assert prevented(rows) == sentence


def test_plain_lines_show_changes(capsys: pytest.CaptureFixture[str]) -> None:
    """A thread is printed again only when it changed, and the heading is printed once."""
    rows = [row(), row("bob")]
    lines = View(rows, "")
    lines.show()
    lines.show()
    rows[1].used["tool:search"] = 4
    lines.show()
    printed = capsys.readouterr().out.splitlines()
    assert [text.split()[0] for text in printed] == ["thread", "ann", "bob", "bob"]

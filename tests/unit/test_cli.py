"""The command line's arguments, and the numbers and pictures of the demo."""

import io
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from langchain_quota import Call, Decision, Level, ModelCallLimit, ToolCallLimit, __version__
from langchain_quota.cli import main
from langchain_quota.cli.bars import STYLES
from langchain_quota.cli.demo import prevented
from langchain_quota.cli.demo_view import Row, View, gauge, table
from langchain_quota.limits import Limit
from tests.forked import run_python, without
from tests.judged import Used, judge

SEARCH = ToolCallLimit("search", thread_limit=5, run_limit=3)
MODEL = ModelCallLimit(thread_limit=4)


def search(number: int, thread: str = "ann") -> Call:
    return Call("tool", "search", f"call-{number}", thread_id=thread)


def decide(limit: Limit, used: int, *calls: Call) -> tuple[Decision, ...]:
    return judge([limit], {limit.counter: Used(used, 0)}, calls).decisions


def row(thread: str = "ann", used: int = 3, last_refusal: str = "") -> Row:
    return Row(thread, {"tool:search": used}, {"tool:search": 8}, used, 1, last_refusal)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints the version, and succeeds."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"langchain-quota {__version__}\n"


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


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command nothing runs, and the code is 2."""
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "required: command" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_what_is_not_needed_is_not_imported(option: str) -> None:
    """The version and the help come without LangChain, which takes a second to import."""
    program = (
        "import sys\n"
        "before = {*sys.modules}\n"
        "from langchain_quota.cli import main\n"
        "try:\n"
        f"    main([{option!r}])\n"
        "except SystemExit:\n"
        "    print(*{each.partition('.')[0] for each in {*sys.modules} - before})\n"
    )
    # The processes of `run_python` have imported LangChain.
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    imported = {*ended.stdout.splitlines()[-1].split()}
    assert imported - sys.stdlib_module_names == {"langchain_quota"}


@pytest.mark.parametrize("package", ["rich", "langgraph.checkpoint.sqlite", "opentelemetry.sdk"])
def test_extra_is_missing(package: str) -> None:
    """The command line works without the extra; the demo then says how to install it."""
    program = "from langchain_quota.cli import main; sys.exit(main(['demo']))"
    ended = run_python(without(package) + program)
    assert ended.returncode == 2
    assert ended.stdout == ""
    (reason,) = ended.stderr.splitlines()
    assert package in reason
    assert reason.endswith('pip install "langchain-quota[demo]"')


def test_extra_of_top_is_missing() -> None:
    """Without rich the live view says how to install it, and the extra is its own."""
    program = "from langchain_quota.cli import main; sys.exit(main(['top']))"
    ended = run_python(without("rich") + program)
    assert (ended.returncode, ended.stdout) == (2, "")
    (reason,) = ended.stderr.splitlines()
    assert reason.endswith('needs the package rich.console: pip install "langchain-quota[top]"')


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


@pytest.mark.parametrize(
    ("used", "limit", "expected"),
    [
        (0, 8, "0/8 ________"),
        (1, 80, "1/80  ▇_______"),
        (3, 8, "3/8 ▇▇▇_____"),
        (79, 80, "79/80 ▇▇▇▇▇▇▇_"),
        (8, 8, "8/8 ▇▇▇▇▇▇▇▇"),
        (9, 8, "9/8 ▇▇▇▇▇▇▇▇"),
        (0, 0, "0/0 ▇▇▇▇▇▇▇▇"),
        (950, 7_000, "950/7k  ▇_______"),
        (6_999, 7_000, "6.9k/7k ▇▇▇▇▇▇▇_"),
    ],
)
def test_gauge(used: int, limit: int, expected: str) -> None:
    """A bar is empty only at 0, full only from the limit on, and never longer."""
    assert gauge(used, limit, 8).plain == expected


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


@pytest.mark.parametrize(("width", "bars"), [(80, 8), (100, 7), (140, 17)])
def test_table_fits(width: int, bars: int) -> None:
    """The table of the demo's limits fits terminals of 80 columns and more, with bars to see."""
    most = {"tool:search": 8, "tool:*": 16, "model": 20, "tokens": 6_000}
    used = {**most, "tokens": 6_500}
    console = Console(file=io.StringIO(), width=width)
    console.print(table([Row("customer-1", used, most, 27, 12, "search (thread)")], console))
    assert isinstance(console.file, io.StringIO)
    heading, text = console.file.getvalue().splitlines()
    full = "▇" * bars
    wide = (["allowed"], ["last", "refusal"]) if width > 80 else ([], [])
    titles = ["thread", "search", "tools", "model", "tokens", *wide[0], "blocked", *wide[1]]
    assert heading.split() == titles
    uses_shown = f"customer-1 8/8 {full} 16/16 {full} 20/20 {full} 6.5k/6k {full} "
    assert text.startswith(uses_shown)
    counts = "27 12 search (thread)" if width > 80 else "12"
    assert " ".join(text.removeprefix(uses_shown).split()) == counts


def test_only_bars_have_colors() -> None:
    """Numbers keep the terminal's own color, which can be read on dark and light backgrounds."""
    for used, level in ((6, Level.OK), (7, Level.NEAR), (8, Level.EXHAUSTED)):
        shown = gauge(used, 8, 8)
        assert [(each.start, each.style) for each in shown.spans] == [(len("7/8 "), STYLES[level])]


def test_markup_in_a_name_is_text() -> None:
    """A thread's name and a refusal are shown as they are, even where rich would read markup."""
    console = Console(file=io.StringIO(), width=120)
    console.print(table([row("[/red]ann[bold]", last_refusal="[/] (run)")], console))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "[/red]ann[bold]" in shown
    assert "[/] (run)" in shown


def test_bars_in_ascii() -> None:
    """Where the output cannot encode the bar's character, the bar is made of ASCII."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, width=80)
    console.print(table([row()], console))
    file.flush()
    assert b"3/8 ####" in file.buffer.getvalue()

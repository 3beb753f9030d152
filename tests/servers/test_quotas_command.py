"""`langchain-quota quotas`: what is used, of what, until when, and back to 0."""

import json
import os
import pty
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
import redis
from langchain_core.messages import AIMessage
from langchain_core.messages.ai import UsageMetadata

from langchain_quota import (
    CostLimit,
    ModelCallLimitExceededError,
    Quota,
    QuotaMiddleware,
    TokenLimit,
)
from langchain_quota.admission import Compensation
from langchain_quota.cli import main
from langchain_quota.limit_options import MICRODOLLARS
from langchain_quota.stores.keys import CountKey
from langchain_quota.stores.redis import RedisStore
from tests.forked import COMMAND_LINE, run_python, start_python
from tests.servers.agents import build_agent
from tests.servers.proxy import proxy
from tests.servers.redis import RedisServer, free_port, running_redis
from tests.servers.stores import batch, calls, compensating

ADA = str(CountKey("search", "user_id", "ada"))
BOB = str(CountKey("search", "user_id", "bob"))
ALL = str(CountKey("__all__", "global", ""))
DAY = CountKey.at("email", "tenant", "acme", timedelta(days=1), 4_102_444_800)
"""The first of January 2100."""

Run = Callable[..., int]


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[RedisStore]:
    """A store with some counts."""
    prefix = redis_server.prefix()
    with closing(RedisStore(redis_server.url, prefix=prefix, timeout=30)) as store:
        store.acquire(calls(ADA, 3, limit=5))
        store.acquire(calls(BOB, 12, limit=1000))
        store.acquire(compensating(Compensation("late", {ALL: 1})))
        assert DAY.ends is not None
        store.acquire(batch({str(DAY): 2}, ends={str(DAY): DAY.ends}))
        yield store


@pytest.fixture
def run(redis_server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command on the store; the environment names the server."""
    monkeypatch.setenv("LANGCHAIN_QUOTA_REDIS_URL", redis_server.url)
    return lambda *arguments: main(["quotas", *arguments, "--prefix", str(store.prefix)])


def used(store: RedisStore) -> list[int]:
    """The counts of Ada, Bob, all, and the day."""
    return [use.used for use in store.peek([ADA, BOB, ALL, str(DAY)]) if use is not None]


def test_show(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """All counts, sorted, as a table."""
    assert run("show") == 0
    assert capsys.readouterr().out.splitlines() == [
        "counted  per      subject  used    of  until",
        "__all__  global   ''          1     -  reset",
        "email    tenant   'acme'      2     -  2100-01-02 00:00:00 UTC",
        "search   user_id  'ada'       3     5  reset",
        "search   user_id  'bob'      12  1000  reset",
    ]


def test_budgets_have_units(
    run: Run, store: RedisStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an agent's calls used is shown in tokens and dollars; after a reset it may go on."""
    used = UsageMetadata(input_tokens=1_199, output_tokens=1, total_tokens=1_200)
    answer = AIMessage("Hello.", usage_metadata=used)
    budgets: list[TokenLimit | CostLimit] = [
        TokenLimit(quotas=[Quota(50_000, per="user_id")]),
        CostLimit(quotas=[Quota(4, per="tenant")], exit_behavior="error"),
    ]
    quota = QuotaMiddleware(budgets, store=store, prices=lambda _: Decimal("4.250001"))
    agent = build_agent([answer, answer], [quota])

    def ask() -> None:
        agent.invoke({"messages": []}, context={"tenant": "acme", "user_id": "ada"})

    ask()
    with pytest.raises(ModelCallLimitExceededError):
        ask()
    assert run("reset", "--key", "model.*", "--yes") == 0
    assert capsys.readouterr().out.splitlines() == [
        "counted             per      subject          used             of  until",
        "model.microdollars  tenant   'acme'      $4.250001          $4.00  reset",
        "model.total_tokens  user_id  'ada'    1,200 tokens  50,000 tokens  reset",
        "2 reset to 0",
    ]
    ask()


@pytest.mark.parametrize(
    ("patterns", "subjects"),
    [
        (["--key", "search:*"], ["'ada'", "'bob'"]),
        (["--key", "*:ada"], ["'ada'"]),
        (["--key", "*:ada", "email:*"], ["'acme'", "'ada'"]),
        (["--key", "*:bob", "--key", "search:*"], ["'ada'", "'bob'"]),
    ],
)
def test_show_some(
    run: Run, capsys: pytest.CaptureFixture[str], patterns: list[str], subjects: list[str]
) -> None:
    """Patterns choose counts; one that two patterns match is shown once."""
    assert run("show", *patterns) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[1:]] == subjects


@pytest.mark.parametrize(
    ("patterns", "subjects"),
    [
        (["--key", "search:*"], ["'ada'", "'bob'"]),
        (["--key", "*:run:*"], ["'one'", "'two'"]),
        (["--key", "*:root_run:*"], ["'7@1'"]),
        (["--key", "search:run:t*", "*:ada"], ["'two'", "'ada'"]),
    ],
)
def test_runs_are_shown_to_whom_asks(
    run: Run,
    store: RedisStore,
    capsys: pytest.CaptureFixture[str],
    patterns: list[str],
    subjects: list[str],
) -> None:
    """The many counts of runs are neither shown nor reset unless a pattern names them."""
    runs = [str(CountKey("search", "run", name)) for name in ("one", "two")]
    of_root_run = str(CountKey("search", "root_run", "7@1"))
    number = str(CountKey("", "root_run", "7"))
    for key in (*runs, of_root_run, number):
        store.acquire(calls(key, 1))
    assert run("show", *patterns) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[1:]] == subjects
    assert run("reset", "--yes") == 0
    assert "run" not in capsys.readouterr().out
    assert [use.used for use in store.usages("*:run:*")] == [1, 1]


def test_show_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """That there is no count is said."""
    assert run("show", "--key", "nothing") == 0
    assert capsys.readouterr().out == "no counts\n"


def test_subject_is_escaped(
    run: Run, store: RedisStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's text forges no line and moves no cursor; a key of no known form is shown, too."""
    store.reset([str(CountKey("a\nb", "user_id", "x\n'\x1b[2J\u202e\ud800é")), "odd\nkey"])
    assert run("show", "--key", "a*", "odd*") == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split() == [
        "a\\nb",
        "user_id",
        '"x\\n\'\\x1b[2J\\u202e\\ud800é"',
        "0",
        "-",
        "reset",
    ]
    assert second.split() == ["odd\\nkey", "-", "-", "0", "-", "reset"]


ODD: dict[str, Callable[[redis.Redis, bytes], object]] = {
    "a name that is no UTF-8": lambda client, name: client.hset(name + b"\xff", "used", 1),
    "an end that is no number": lambda client, name: client.hset(
        name, mapping={"used": 1, "ends": "nan"}
    ),
    "a limit that is no number": lambda client, name: client.hset(
        name, mapping={"used": 1, "limit": "inf"}
    ),
    "a count that is no number": lambda client, name: client.hset(name, "used", "abc"),
    "a count of nan": lambda client, name: client.hset(name, "used", "nan"),
    "a count below zero": lambda client, name: client.hset(name, "used", -2),
    "a count that is too large": lambda client, name: client.hset(name, "used", "9" * 400),
    "no count": lambda client, name: client.hset(name, "other", 1),
    "a string": lambda client, name: client.set(name, 1),
    "a list": lambda client, name: client.lpush(name, 1),
}
"""What others may leave beside counts."""


@pytest.fixture(params=ODD)
def odd(request: pytest.FixtureRequest, redis_server: RedisServer, store: RedisStore) -> str:
    """Leaves something among the counts that is none; how the command names it."""
    name = f"{{{store.prefix!s}}}:count:search:user_id:odd\x1b[2J\n".encode()
    with redis_server.client() as client:
        ODD[request.param](client, name)
        [found] = client.scan_iter(match=f"{{{store.prefix!s}}}*odd*", count=10_000)
    return repr(found)


def test_show_beside_what_is_no_count(
    run: Run, odd: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The counts are shown, what is none is named, on one line, and the code is 1."""
    assert run("show", "--key", "search:*") == 1
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "counted  per      subject  used    of  until",
        "search   user_id  'ada'       3     5  reset",
        "search   user_id  'bob'      12  1000  reset",
    ]
    [reason] = said.err.splitlines()
    assert reason == f"langchain-quota quotas: {odd} holds no count, and is left as it is"
    assert reason.isprintable()


def test_reset_beside_what_is_no_count(
    run: Run,
    odd: str,
    store: RedisStore,
    redis_server: RedisServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The counts are reset, what is none is left as it is and named, and the code is 1."""
    with redis_server.client() as client:
        [name] = client.scan_iter(match=f"{{{store.prefix!s}}}*odd*", count=10_000)
        before = client.dump(name)
        assert run("reset", "--yes") == 1
        assert client.dump(name) == before
    assert odd in capsys.readouterr().err
    assert used(store) == [0, 0, 0, 0]


@pytest.mark.usefixtures("odd")
def test_what_is_no_count_can_be_left_out(run: Run) -> None:
    """Of what no pattern matches nothing is said."""
    assert run("show", "--key", "*:ada", "email:*") == 0


@pytest.mark.usefixtures("odd")
def test_nothing_but_what_is_no_count(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a count nobody is asked, and other keys are still named."""
    assert run("reset", "--key", "*odd*") == 1
    said = capsys.readouterr()
    assert said.out == "no counts\n"
    assert "holds no count" in said.err


def test_much_that_is_no_count(
    run: Run, store: RedisStore, redis_server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of many some are named, and of a long name the beginning."""
    with redis_server.client() as client:
        for number in range(30):
            client.set(f"{{{store.prefix!s}}}:count:odd:{number}:{'x' * 10_000}", 1)
    assert run("show") == 1
    *named, last = capsys.readouterr().err.splitlines()
    assert len(named) == 20
    assert all(len(line) < 400 for line in named)
    assert last == "langchain-quota quotas: 10 more hold no count, and are left as they are"


def test_message_of_an_error_is_escaped(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an address or a server has in an error moves no cursor."""
    assert run("show", "--redis", f"unix://{tmp_path}/\x1b[2J\x07") == 2
    [reason] = capsys.readouterr().err.splitlines()
    assert reason.isprintable()


def test_terminal_without_all_characters(store: RedisStore, redis_server: RedisServer) -> None:
    """What the output cannot encode is escaped."""
    store.reset([str(CountKey("search", "user_id", "é"))])
    done = run_python(
        COMMAND_LINE,
        *("quotas", "show", "--redis", redis_server.url),
        *("--prefix", str(store.prefix), "--key", "*C3*"),
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert "'\\xe9'" in done.stdout


def test_reset_some(run: Run, store: RedisStore, capsys: pytest.CaptureFixture[str]) -> None:
    """With --yes what matches is listed and reset, and nothing else."""
    assert run("reset", "--key", "search:*", "--yes") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[1:-1]] == ["'ada'", "'bob'"]
    assert lines[-1] == "2 reset to 0"
    assert used(store) == [0, 0, 1, 2]


def test_reset_all(run: Run, store: RedisStore) -> None:
    """Without patterns all counts are reset."""
    assert run("reset", "--yes") == 0
    assert used(store) == [0, 0, 0, 0]


def test_reset_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing matches nobody is asked."""
    assert run("reset", "--key", "nothing") == 0
    assert capsys.readouterr().out == "no counts\n"


def test_reset_many(run: Run, store: RedisStore, capsys: pytest.CaptureFixture[str]) -> None:
    """More counts than are read or reset at once."""
    keys = [str(CountKey("many", "user_id", str(number))) for number in range(1234)]
    store.acquire(batch(dict.fromkeys(keys, 1)))
    assert run("reset", "--key", "many:*", "--yes") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1234 reset to 0"
    assert {use.used for use in store.usages("many:*")} == {0}
    assert used(store) == [3, 12, 1, 2]


def test_reset_without_a_terminal(
    run: Run, store: RedisStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nobody can be asked nothing is reset, and one line says what to pass."""
    assert run("reset") == 2
    assert capsys.readouterr().err == (
        "langchain-quota quotas: reset asks first, and there is no terminal: pass --yes\n"
    )
    assert used(store) == [3, 12, 1, 2]


@pytest.mark.parametrize(
    ("typed", "code", "last"),
    [
        (b"y\n", 0, "2 reset to 0"),
        (b"YES\n", 0, "2 reset to 0"),
        (b"\n", 1, "nothing was reset"),
        (b"n\n", 1, "nothing was reset"),
        (b"\x04", 1, "nothing was reset"),
    ],
)
def test_reset_asks(
    store: RedisStore,
    redis_server: RedisServer,
    typed: bytes,
    code: int,
    last: str,
) -> None:
    """In a terminal the command asks, and only a clear yes resets."""
    keyboard, terminal = pty.openpty()
    readable, writable = os.pipe()
    with (
        os.fdopen(readable, "rb", buffering=0) as output,
        start_python(
            COMMAND_LINE,
            *("quotas", "reset", "--redis", redis_server.url),
            *("--prefix", str(store.prefix), "--key", "search:*"),
            stdin=terminal,
            stdout=writable,
            stderr=2,
        ) as process,
    ):
        os.close(writable)
        shown = b""
        while not shown.endswith(b"Reset 2 to 0? [y/N] "):
            read = output.read(4096)
            assert read, shown
            shown += read
        assert used(store) == [3, 12, 1, 2]
        os.write(keyboard, typed)
        said = output.read()
        assert process.wait(60) == code
    os.close(keyboard)
    os.close(terminal)
    assert said.decode().splitlines()[-1] == last
    assert used(store) == ([0, 0, 1, 2] if code == 0 else [3, 12, 1, 2])


@pytest.mark.parametrize("action", ["show", "reset"])
@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cr3t@127.0.0.1:6379/0",
        "redis://worker:s3cr3t@127.0.0.1:6379/0",
        "redis://worker:s3/cr3t@127.0.0.1:6379/0",
        "rediss://127.0.0.1:6379/0?password=s3cr3t",
        "unix://127.0.0.1/socket?db=1&password=s3cr3t",
    ],
)
def test_password_among_the_arguments(
    capsys: pytest.CaptureFixture[str], action: str, url: str
) -> None:
    """A URL with a password is refused unread: others on the machine can see it."""
    assert main(["quotas", action, "--redis", url]) == 2
    (reason,) = capsys.readouterr().err.splitlines()
    assert "LANGCHAIN_QUOTA_REDIS_URL" in reason
    assert "cr3t" not in reason


def test_user_without_a_password(
    run: Run, redis_server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """A URL with a mere user name is taken."""
    url = redis_server.url.replace("//", "//default@")
    assert run("show", "--redis", url, "--key", ADA) == 0
    assert "'ada'" in capsys.readouterr().out


def test_password_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A password in the environment is used, and never shown."""
    with running_redis(tmp_path / "redis") as server:
        with server.client() as client:
            client.config_set("requirepass", "s3cr3t")
        url = server.url.replace("//", "//:{}@")
        monkeypatch.setenv("LANGCHAIN_QUOTA_REDIS_URL", url.format("s3cr3t"))
        assert main(["quotas", "show"]) == 0
        monkeypatch.setenv("LANGCHAIN_QUOTA_REDIS_URL", url.format("wr0ng"))
        assert main(["quotas", "show"]) == 2
    said = capsys.readouterr()
    assert said.out == "no counts\n"
    (reason,) = said.err.splitlines()
    assert "username-password" in reason
    assert "wr0ng" not in reason


@pytest.mark.parametrize("action", [["show"], ["reset", "--yes"]])
def test_nobody_there(capsys: pytest.CaptureFixture[str], action: list[str]) -> None:
    """A server that cannot be reached is one line, and code 2."""
    assert main(["quotas", *action, "--redis", f"redis://127.0.0.1:{free_port()}"]) == 2
    (reason,) = capsys.readouterr().err.splitlines()
    assert reason.startswith("langchain-quota quotas: RedisStore(redis://127.0.0.1:")
    assert "refused" in reason


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--redis", "http://127.0.0.1"], "the URL of Redis must be"),
        (["--redis", "redis://127.0.0.1", "--prefix", "a b"], "prefix must match"),
        ([], "LANGCHAIN_QUOTA_REDIS_URL is not set"),
    ],
)
def test_wrong_argument(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
) -> None:
    """What is wrong is one line, and code 2."""
    monkeypatch.delenv("LANGCHAIN_QUOTA_REDIS_URL", raising=False)
    assert main(["quotas", "show", *arguments]) == 2
    (reason,) = capsys.readouterr().err.splitlines()
    assert text in reason


def test_extra_is_missing() -> None:
    """Without redis the command says how to install it; the rest of the command line works."""
    code = f"import sys; sys.modules['redis'] = None; {COMMAND_LINE}"
    done = run_python(code, "quotas", "show")
    assert done.returncode == 2
    assert done.stdout == ""
    (reason,) = done.stderr.splitlines()
    assert reason == (
        'langchain-quota quotas: needs the package redis: pip install "langchain-quota[redis]"'
    )


def grant_lines(text: str) -> list[str]:
    """A command's lines, without what differs from run to run."""
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "THEN", text).splitlines()


def test_grant(run: Run, store: RedisStore, capsys: pytest.CaptureFixture[str]) -> None:
    """More of a count: on the list, in the table, and as a line of JSON for the audit log."""
    asked = ("--key", ADA, "50", "--for", "1d", "--reason", "ticket 4711", "--by", "bo")
    assert run("grant", *asked, "--id", "4711") == 0
    said = capsys.readouterr()
    assert grant_lines(said.out) == [f"granted 50 calls under {ADA} until THEN, id 4711"]
    audit = json.loads(said.err)
    [grant] = store.grants()
    assert grant.until is not None
    assert timedelta(days=1, seconds=-1) < grant.until - grant.given_at <= timedelta(days=1)
    assert datetime.fromisoformat(audit.pop("time")) >= grant.given_at - timedelta(seconds=1)
    assert audit == {
        "quota_event": "granted",
        "quota_key": ADA,
        "quota_grant": "4711",
        "quota_amount": 50,
        "quota_unit": "calls",
        "quota_until": grant.until.isoformat(),
        "quota_reason": "ticket 4711",
        "quota_by": "bo",
    }
    assert run("grant", *asked, "--id", "4711") == 0
    said = capsys.readouterr()
    assert said.out.startswith("was granted before: 50 calls")
    assert said.err == ""
    assert run("grants") == 0
    assert grant_lines(capsys.readouterr().out) == [
        "key                 granted  until                    by    reason         id",
        f"{ADA}       50  THEN  'bo'  'ticket 4711'  4711",
    ]
    assert run("show", "--key", ADA) == 0
    assert capsys.readouterr().out.splitlines()[1] == "search   user_id  'ada'       3  55  reset"


def test_revoke(run: Run, store: RedisStore, capsys: pytest.CaptureFixture[str]) -> None:
    """A grant ends now, is logged, and is there no more; another key's with its id goes on."""
    adam = f"{ADA}m"
    store.grant(adam, 9, id="4711")
    assert run("revoke", "--key", ADA, "--id", "4711") == 2
    capsys.readouterr()
    assert store.revoke(adam, "4711") is not None
    store.grant(ADA, 50, id="4711")
    assert run("revoke", "--key", ADA, "--id", "4711") == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"revoked 50 calls under {ADA}")
    assert json.loads(said.err)["quota_event"] == "revoked"
    assert run("grants", "--key", "search:*") == 0
    assert capsys.readouterr().out == "no grants\n"
    assert run("revoke", "--key", ADA, "--id", "4711") == 2
    assert "nothing is granted under" in capsys.readouterr().err
    assert run("grant", "--key", ADA, "50", "--reason", "more", "--id", "4711") == 0
    assert capsys.readouterr().out.startswith("was granted before, and is over: 50 calls")


def test_grant_in_a_window(run: Run, store: RedisStore, capsys: pytest.CaptureFixture[str]) -> None:
    """A key without a window is that of the window that runs, if one count alone is meant."""
    base = str(CountKey("mail", "user_id", "ada"))
    reason = ("--reason", "more")
    assert run("grant", "--key", base, "5", *reason) == 2
    assert "add the window of the quota, such as --window 1d" in capsys.readouterr().err
    assert run("grant", "--key", base, "5", *reason, "--window", "1d", "--id", "a") == 0
    assert run("grant", "--key", base, "6", *reason, "--id", "b") == 0
    today = CountKey.at("mail", "user_id", "ada", timedelta(days=1), time.time())
    assert {(each.key, each.amount) for each in store.grants()} <= {
        (str(today), 5),
        (str(today), 6),
    }
    assert run("grant", "--key", base, "7", *reason, "--window", "none") == 0
    assert store.grants(base)[0].amount == 7
    capsys.readouterr()
    assert run("grant", "--key", base, "8", *reason) == 2
    assert "several counts are meant" in capsys.readouterr().err
    assert run("revoke", "--key", base, "--id", "b") == 0


def test_grant_dollars(run: Run, store: RedisStore, capsys: pytest.CaptureFixture[str]) -> None:
    """An amount is in the unit of the count."""
    key = str(CountKey(MICRODOLLARS, "tenant", "acme"))
    assert run("grant", "--key", key, "2.50", "--reason", "more", "--window", "none") == 0
    assert capsys.readouterr().out.startswith("granted $2.50 under")
    assert store.grants(key)[0].amount == 2_500_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--key", "nonsense", "5"), "--key must be the key of a count"),
        (("--key", ADA, "0"), "amount must be above 0"),
        (("--key", ADA, "five"), "amount must be a whole number"),
        (("--key", ADA, "5", "--id", ""), "id must not be empty"),
        (("--key", ADA, "5", "--for", "9999999d"), "--for must end before the year 10000"),
    ],
)
def test_bad_grants(
    run: Run, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be granted is refused in one line."""
    assert run("grant", *arguments, "--reason", "more") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_lost_answer(
    run: Run, store: RedisStore, redis_server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who does not hear whether it is granted reads how to ask again, and it is granted once."""
    asked = ("--key", ADA, "50", "--reason", "more")
    with proxy(redis_server.port) as way:
        way.fail(only_small)
        assert run("grant", *asked, "--redis", way.url) == 2
    audit, reason = capsys.readouterr().err.splitlines()
    name = json.loads(audit)["quota_grant"]
    assert reason.endswith(f"; to try again without granting twice add --id {name}")
    assert run("grant", *asked, "--id", name) == 0
    assert capsys.readouterr().out.startswith("was granted before: 50 calls")
    assert [each.amount for each in store.grants()] == [50]


def only_small(reply: bytes) -> Iterator[bytes]:
    """What Redis says while a client connects arrives, and that it does not know a script yet."""
    if b"quota" in reply or b"reason" in reply:
        raise ConnectionResetError
    yield reply

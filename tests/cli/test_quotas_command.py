"""`langchain-quota quotas`: what is used, of what, until when, and back to 0."""

import io
import json
import os
import pwd
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest

from langchain_quota import (
    CostLimit,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    TimeLimit,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.cli import main
from langchain_quota.core.admission import (
    AcquireRequest,
    Correction,
    CountRef,
    Demand,
    Rollover,
    Threshold,
)
from langchain_quota.limits import Limit
from langchain_quota.stores.postgres import PostgresStore
from langchain_quota.stores.redis import RedisStore
from tests.server.proxy import proxy
from tests.server.redis import RedisServer, free_port
from tests.server.stores import batch, calls, correcting

ADA, BOB, ALL = "search:user_id:ada", "search:user_id:bob", "__all__:global:"
DAY, END = "email:tenant:acme:86400:47482", 47_483 * 86_400
"""The first of January 2100, and its end."""
SMOOTH = "mail:tenant:{}:86400~24"


def count(limit: str, per: str, subject: str = "") -> tuple[str, ...]:
    """The options that choose a count."""
    return "--limit", limit, "--per", per, *(["--subject", subject] if subject else [])


OF_ADA = count("tool:search", "user_id", "ada")

COMMANDS = (Path(__file__).parents[2] / "docs/operate.md").read_text()
Run = Callable[..., Any]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[RedisStore]:
    """A store with some counts."""
    prefix = redis_server.prefix()
    with closing(RedisStore(redis_server.url, prefix=prefix, timeout=30)) as store:
        store.acquire(calls(ADA, 3, limit=5))
        store.acquire(calls(BOB, 12, limit=1000))
        store.acquire(correcting(Correction("late", {ALL: 1})))
        store.acquire(batch({DAY: 2}, ends={DAY: END}))
        yield store


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of whoever runs the tests names no store."""
    monkeypatch.delenv("LANGCHAIN_QUOTA_STORE", raising=False)


@pytest.fixture
def run(
    redis_server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> Run:
    """Runs the command on the store, and gives what it writes; the environment names the server."""
    monkeypatch.setenv("LANGCHAIN_QUOTA_REDIS_URL", redis_server.url)

    def run(*arguments: str, code: int = 0) -> Any:
        assert main(["quotas", *arguments, "--prefix", str(store.prefix)]) == code
        return capsys.readouterr()

    return run


def used(store: RedisStore) -> list[int]:
    """The counts of Ada, Bob, all, and the day."""
    return [use.used for use in store.peek([ADA, BOB, ALL, DAY]) if use is not None]


def test_show(run: Run, store: RedisStore, capsys: Capture) -> None:
    """All counts, sorted, as a table, with the names that choose them; none is said."""
    money, tokens = "model.nanodollars:tenant:acme", "model.total_tokens:user_id:ada"
    limits = {money: 4 * 10**9, tokens: 50_000}
    store.acquire(
        correcting(Correction("paid", {money: 4_250_000_001, tokens: 1_200}, limits=limits))
    )
    assert run("show").out.splitlines() == [
        "limit        per      subject          used             of  until",
        "cost         tenant   'acme'   $4.250000001          $4.00  reset",
        "tokens       user_id  'ada'    1,200 tokens  50,000 tokens  reset",
        "tool:*       global   ''                  1              -  reset",
        "tool:email   tenant   'acme'              2              -  2100-01-02 00:00:00 UTC",
        "tool:search  user_id  'ada'               3              5  reset",
        "tool:search  user_id  'bob'              12           1000  reset",
    ]
    assert main(["quotas", "show", "--prefix", f"{store.prefix}.new"]) == 0
    assert capsys.readouterr().out == "no counts\n"


@pytest.mark.parametrize("server", ["redis", "postgres"])
def test_names_and_units(
    server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Each kind of limit is named as in Python, and granted more in its own unit."""
    get = request.getfixturevalue
    url = get("postgres_url") if server == "postgres" else get("redis_server").url
    monkeypatch.setenv("LANGCHAIN_QUOTA_STORE", url)
    monthly: Any = {"quotas": [Quota(5, per="tenant", window="month")]}
    tools = (None, "search", ["mail", "calc"], "model", "cost", "model.nanodollars")
    limits: list[Limit] = [
        *(ToolCallLimit(tool, **monthly) for tool in tools),
        *(TokenLimit(tokens=kind, **monthly) for kind in ("total", "input", "output")),
        *(kind(**monthly) for kind in (ModelCallLimit, CostLimit, TimeLimit)),
        ToolCallLimit(exclude="mail", **monthly),
    ]
    prefix, kind = f"names.{uuid4().hex}", RedisStore if server == "redis" else PostgresStore
    with closing(kind(url, prefix=prefix, timeout=30)) as store:
        quota: Any = QuotaMiddleware(limits, store=store, prices=lambda _: 1)
        for limit in limits:
            quota.reset(limit.name, tenant="acme")
            granting = "quotas", "grant", "1", *count(limit.name, "tenant", "acme")
            assert main([*granting, "--prefix", prefix]) == 0
            left = quota.left(limit.name, tenant="acme")
            assert (left.used, left.limit) == (0, 6)
            amount = {"dollars": "$1.00", "seconds": "1s"}.get(left.unit, f"1 {left.unit[:-1]}")
            said = f"granted {amount} of {limit.name} to tenant 'acme' until "
            assert capsys.readouterr().out.startswith(said)
    assert main(["quotas", "show", "--json", "--prefix", prefix]) == 0
    shown = [(each["counted"], each["granted"]) for each in objects(capsys.readouterr().out)]
    assert shown == sorted((limit.name, 1) for limit in limits)


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("show --limit tool:serach", "has --limit 'tool:serach' now; nearest: 'tool:search'"),
        ("reset --yes --per userid", "no count has --per 'userid' now; nearest: 'user_id'"),
        ("show --limit cost", "no count has --limit 'cost' now; nearest: 'tool:*' or "),
        ("show --per tenant --subject bob", "no count has --subject 'bob' now; nearest: 'acme'"),
        ("grant 5 --limit tool:search --per user_id", "--subject '' now; nearest: 'ada' or 'bob'"),
        ("revoke --id 1 --per user_id", "no such grant has the id '1': see quotas grants"),
        ("thaw --per tenant --subject acne", "tenant 'acne'; frozen: the calls of tenant 'acme'"),
        ("freeze --per tenant", "a freeze needs per and subject, or neither: 'tenant', ''"),
    ],
)
def test_what_is_not_there(run: Run, store: RedisStore, typed: str, nearest: str) -> None:
    """Names that hold nothing are an error, which says what is nearest; nothing is changed."""
    run("freeze", "--per", "tenant", "--subject", "acme")
    assert nearest in run(*typed.split(), code=2).err
    assert used(store) == [3, 12, 1, 2]


def objects(text: str) -> list[dict[str, Any]]:
    """The objects that a command printed, one a line."""
    return [json.loads(line) for line in text.splitlines()]


def test_json(run: Run, store: RedisStore) -> None:
    """A script reads one object a line, with the names of the reference, and exact dollars."""
    per = ("tenant", "a\n\ud800")
    money = "model.nanodollars:tenant:a%0A%ED%A0%80:86400:47482"
    store.acquire(batch({money: 4_250_000_001}, limits={money: 5 * 10**9}, ends={money: END}))
    grant = store.grant(money, "0.5", window=None, id="4711", by="bo", reason="x\ny")
    run("freeze", "--per", "tenant", "--subject", "x", "--reason", "abuse")
    same = {"key": money, "counted": "cost", "per": per[0], "subject": per[1]}
    end = {"unit": "dollars", "granted": 0.5}
    frozen, *shown = objects(run("show", "--json").out)
    assert [each["subject"] for each in shown] == [per[1], "", "acme", "ada", "bob"]
    counts = {"used": 4.250000001, "limit": 5.5, "left": 1.249999999, "rolled_over": None}
    assert shown[0] == {**same, **end, **counts, "resets_at": "2100-01-02T00:00:00+00:00"}
    assert shown[1]["limit"] is shown[1]["left"] is shown[1]["resets_at"] is None
    stopped, given = objects(run("grants", "--json").out)
    times = {"given_at": grant.given_at.isoformat(), "until": shown[0]["resets_at"]}
    more = {"frozen": False, **times, "id": "4711", "by": "bo", "reason": "x\ny"}
    assert given == {**same, **end, **more}
    assert frozen == stopped
    fields = ("key", "per", "subject", "granted", "frozen", "until", "reason")
    expected = [":tenant:x", "tenant", "x", 0, True, None, "abuse"]
    assert [frozen[field] for field in fields] == expected
    for names in (shown[0], given):
        assert f"`{'`, `'.join(names)}`" in " ".join(COMMANDS.split())
    assert run("grants", "--json", "--per", "x").out == ""
    run("reset", "--yes", "--per", "user_id", "--subject", "ada")
    assert used(store) == [0, 12, 1, 2]


def test_rolled_over(run: Run, store: RedisStore) -> None:
    """What rolled over is a part of the limit; a window that is over is not listed, nor reset."""
    today, key = int(time.time()) // 86_400, "search:tenant:eve:86400:{}"
    for day, previous in ((today - 2, ALL), (today, key.format(today - 2))):
        rollover = Rollover(previous, 5, 9, (today + 2) * 86_400)
        count = CountRef(key.format(day), expires_at=(day + 1) * 86_400, rollover=rollover)
        demand = Demand({"eve": 7}, (Threshold("limit", "tenant", "eve", 9),))
        store.acquire(AcquireRequest("", "", {"eve": count}, (demand,)))
    over = int(time.time()) // 60 * 60  # it is kept for an hour at least
    just_over = f"search:tenant:eva:60:{over // 60 - 1}"
    store.acquire(batch({just_over: 9}, limits={just_over: 9}, ends={just_over: over}))
    assert [use.used for use in store.usages("*:ev?:*")] == [9, 7, 7]
    assert run("freeze", "--per", "tenant", "--subject", "eva").err == ""
    said = run("show", "--json", "--subject", "eva", code=2).err
    assert said.endswith("no count has --subject 'eva' now; nearest: 'eve'\n")
    options = ("--near", "0.1", "--limit", "tool:search", "--subject", "eve")
    [shown] = objects(run("show", "--json", *options).out)
    numbers = {name: shown[name] for name in ("used", "limit", "left", "granted", "rolled_over")}
    assert numbers == {"used": 7, "limit": 11, "left": 4, "granted": 2, "rolled_over": 2}
    run("reset", "--yes", "--subject", "eve")
    assert sorted(use.used for use in store.usages("*:ev?:*")) == [0, 7, 9]


LONG = "o'neil-" * 30
DIGEST = "334d1f7352175b2eefbc6af406f951fa39e8e72d05f41fc56adab42eef2533ff"
SHORTENED = f"search:user_id:{'o%27neil-' * 4}o%27~{DIGEST}"
"""A subject, and its key, which has shortened it."""


@pytest.mark.parametrize(
    ("arguments", "subjects"),
    [
        ("--near", ["none", "long"]),
        ("--near 0.6", ["ada", "none", "long"]),
        ("--near 0.9", ["none"]),
        ("--per user_id", ["ada", "bob", "none", "long"]),
        ("--limit tool:search --per user_id --subject bob", ["bob"]),
        (f"--subject {LONG}", ["long"]),
        (f"--per user_id --subject {unquote(SHORTENED[15:])}", ["long"]),
        ("--key search:run:one", ["one"]),
        ("--limit concurrency:browser", [""]),
        ("--per run", ["one"]),
        ("--per root_run", ["7@1"]),
        ("--sort share --per user_id", ["none", "long", "ada", "bob"]),
        ("--sort used", ["bob", "long", "ada", "acme", "none", "", "", "even"]),
        ("--sort reset --per tenant", ["acme", "even"]),
    ],
)
def test_some_counts(run: Run, store: RedisStore, arguments: str, subjects: list[str]) -> None:
    """Counts are chosen by share and names, and sorted; those of runs if they are asked for."""
    for key, count, limit in (
        *((SHORTENED, 5, 5), ("search:user_id:none", 2, 2)),
        *(("search:root_run:7@1", 1, 9), (":root_run:7", 1, 9)),
        *(("search:run:one", 1, 9), (SMOOTH.format("even"), 1, 1), ("browser:concurrency:", 1, 4)),
    ):
        store.acquire(calls(key, count, limit=limit))
    store.grant(SHORTENED, 1, window=None)
    named = [each["subject"] for each in objects(run("show", "--json", *arguments.split()).out)]
    assert ["long" if each.startswith("o'neil") else each for each in named] == subjects


def test_completion(tmp_path: Path) -> None:
    """A shell with argcomplete completes the options."""
    typed, out = "langchain-quota quotas show --ne", tmp_path / "completions"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": typed, "COMP_POINT": str(len(typed))}
    given = {**os.environ, **asked, "_ARGCOMPLETE_STDOUT_FILENAME": str(out)}
    program = "from langchain_quota.cli import main; main()"
    subprocess.run([sys.executable, "-c", program], env=given, check=True)
    assert out.read_text() == "--near "


def test_a_smooth_quota(run: Run, store: RedisStore) -> None:
    """It is shown with its burst, is reset as any other, and takes no grant."""
    key = SMOOTH.format("")
    store.acquire(calls(key, 3, limit=4))
    [_, row] = run("show", "--limit", "tool:mail").out.splitlines()
    assert row == "tool:mail  tenant  ''          3   4  it drains"
    refused = run("grant", "5", *count("tool:mail", "tenant"), code=2)
    assert "a smooth quota takes no grants" in refused.err
    run("reset", "--limit", "tool:mail", "--yes")
    assert [use.used for use in store.usages("mail:*")] == [0]


def test_subject_is_escaped(run: Run, store: RedisStore) -> None:
    """A user's text forges no line and moves no cursor; a key of another form is named."""
    store.reset(["a%0Ab:user_id:x%0A%27%1B%5B2J%E2%80%AE%ED%A0%80%C3%A9"])
    store.acquire(calls("odd\nkey", 1))
    shown = run("show", code=1)
    _, _, first, *_ = shown.out.splitlines()
    assert shown.err.startswith("langchain-quota quotas: 'odd\\nkey' holds no count")
    escaped = '"x\\n\'\\x1b[2J\\u202e\\ud800é"'
    assert first.split() == ["tool:a\\nb", "user_id", escaped, "0", "-", "reset"]


ODD: list[dict[str, Any]] = [
    *({"used": 1, "ends": "nan"}, {"used": 1, "limit": "inf"}, {"other": 1}),
    *({"used": used} for used in ("abc", "nan", -2, "9" * 400)),
]
"""Hashes that others may leave beside counts."""


def test_beside_what_is_no_count(run: Run, store: RedisStore, redis_server: RedisServer) -> None:
    """What is no count is named and left as it is; counts are shown and reset."""
    with redis_server.client() as client:
        begin = f"{{{store.prefix!s}}}:count:odd:user_id:".encode()
        for number, fields in enumerate(ODD):
            client.hset(b"%s%d\x1b[2J\n" % (begin, number), mapping=fields)
        client.hset(begin + b"\xff", "used", 1)
        client.set(begin + b"text", 1)
        client.lpush(begin + b"list", 1)
        found = sorted(client.scan_iter(match=begin + b"*", count=10_000))
        assert len(found) == len(ODD) + 3
        left = [client.dump(name) for name in found]
        for action, lines in (["show"], 5), (["reset", "--yes"], 6):
            shown = run(*action, code=1)
            # A name that is no text is nobody's key.
            named = re.findall("quotas: 'odd:user_id:(.*)' holds no count", shown.err)
            assert len(shown.out.splitlines()) == lines
            assert named == [*(f"{n}\\x1b[2J\\n" for n in range(len(ODD))), "list", "text"]
        assert [client.dump(name) for name in found] == left
    assert used(store) == [0, 0, 0, 0]


@pytest.mark.parametrize("typed", ["y\n", "\n", ""])
def test_reset_asks(
    run: Run, store: RedisStore, typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal it asks, and only a clear yes resets; runs are reset only where it is said."""
    store.acquire(calls("search:run:one", 1))
    said = "langchain-quota quotas: reset asks first, and there is no terminal: pass --yes\n"
    assert run("reset", code=2).err == said
    terminal = io.StringIO(typed)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    said = run("reset", "--limit", "tool:search", code=0 if typed == "y\n" else 1).out
    answer = said.partition("Reset 2 to 0? [y/N] ")[2].strip()
    assert answer == ("2 reset to 0" if typed == "y\n" else "nothing was reset")
    assert used(store) == ([0, 0, 1, 2] if typed == "y\n" else [3, 12, 1, 2])


def test_password_among_the_arguments(capsys: Capture) -> None:
    """A URL with a password is refused unread: others on the machine can see it."""
    for url in (
        *("redis://:s3cr3t@127.0.0.1:6379/0", "redis://worker:s3/cr3t@127.0.0.1:6379/0"),
        *("rediss://127.0.0.1:6379/0?password=s3cr3t", "postgresql://ada:s3cr3t@127.0.0.1/agents"),
        "unix://127.0.0.1/socket?db=1&password=s3cr3t",
    ):
        for action in ("show", "reset"):
            assert main(["quotas", action, "--store", url]) == 2
            (reason,) = capsys.readouterr().err.splitlines()
            assert "set LANGCHAIN_QUOTA_STORE instead" in reason
            assert "cr3t" not in reason


def test_in_postgres(postgres_url: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """The URL says which store it is; its password is that of the variable, or of PostgreSQL's."""
    import psycopg  # noqa: PLC0415 - not everybody who runs the other tests has it

    with closing(PostgresStore(postgres_url, prefix="cli", timeout=30)) as store:
        store.acquire(calls(ADA, 3, limit=5))
    monkeypatch.setenv("LANGCHAIN_QUOTA_STORE", "redis://127.0.0.1:1")
    monkeypatch.setenv("PGPASSWORD", str(urlsplit(postgres_url).password))
    url = re.sub(":[^:]*@", "@", postgres_url)
    assert main(["quotas", "reset", "--yes", "--store", url, "--prefix", "cli"]) == 0
    assert re.search(r"'ada' +3 +5 +reset\n1 reset to 0", capsys.readouterr().out)
    with psycopg.connect(postgres_url) as connection:
        broken = "UPDATE langchain_quota SET value = '[]' WHERE prefix = 'cli' AND kind = 'count'"
        connection.execute(broken)
    assert main(["quotas", "show", "--store", url, "--prefix", "cli"]) == 1
    assert capsys.readouterr().err.startswith(f"langchain-quota quotas: {ADA!r} holds no count")


def test_no_store(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A server that does not answer, or that nobody names well, is one line, and code 2."""
    monkeypatch.delenv("LANGCHAIN_QUOTA_REDIS_URL", raising=False)
    silent = f"redis://127.0.0.1:{free_port()}"
    for arguments, text in (
        (["--store", silent], f"RedisStore({silent}"),
        (["--store", "http://127.0.0.1"], "unix:// or postgresql://…, not http://…"),
        (["--store", "127.0.0.1:6379"], "--store must be redis://, rediss://"),
        (["--store", "redis://127.0.0.1/x"], "the URL of Redis must be"),
        (["--store", "redis://127.0.0.1", "--prefix", "a b"], "prefix must match"),
        ([], "or set LANGCHAIN_QUOTA_STORE or LANGCHAIN_QUOTA_REDIS_URL"),
    ):
        for action in (["show"], ["reset", "--yes"]):
            assert main(["quotas", *action, *arguments]) == 2
            (reason,) = capsys.readouterr().err.splitlines()
            assert text in reason


def told_of(text: str) -> list[str]:
    """A command's lines, without what differs from run to run."""
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "THEN", text).splitlines()


def test_grant(run: Run, store: RedisStore) -> None:
    """More of a count: on the list, in the table, and as a line for the audit log; once."""
    asked = (*OF_ADA, "50", "--for", "1d", "--reason", "ticket 4711", "--by", "bo")
    for _ in range(2):
        said = "granted 50 calls of tool:search to user_id 'ada' until THEN, by 'bo', reason "
        said += "'ticket 4711', id 4711"
        assert told_of(run("grant", *asked, "--id", "4711").out) == [said]
    [grant] = store.grants()
    assert grant.until is not None
    assert timedelta(days=1, seconds=-1) < grant.until - grant.given_at <= timedelta(days=1)
    assert told_of(run("grants").out) == [
        "limit        per      subject  granted  until                    by    reason         id",
        "tool:search  user_id  'ada'         50  THEN  'bo'  'ticket 4711'  4711",
    ]
    assert (
        run("show", *OF_ADA).out.splitlines()[1] == "tool:search  user_id  'ada'       3  55  reset"
    )


def test_freeze(run: Run, store: RedisStore) -> None:
    """A subject or all: who froze it is listed beside grants and counts, until it is thawed."""
    with pytest.raises(SystemExit):
        run("freeze", "--reason", "nobody says whose")
    ada, bo = ("--per", "user_id", "--subject", "ada"), ("--reason", "abuse", "--by", "bo")
    line = "frozen: the calls of user_id 'ada' since THEN until thawed, by 'bo', reason 'abuse'"
    first, second = told_of(run("freeze", *ada, *bo).out)
    assert (first, second[:39]) == (line, "a freeze does not stop calls that ask n")
    assert 'on_store_error="allow", calls while the store is unavailable' in second
    assert store.acquire(calls(ADA, 1)).frozen == (ADA,)
    everything = "frozen: all calls since THEN until THEN, by 'bo', reason 'abuse'"
    assert told_of(run("freeze", "--all", *bo, "--for", "1d").out)[0] == everything
    assert told_of(run("show").out)[:2] == [everything, line]
    words = told_of(run("grants").out)[2].split()[:5]
    assert words == ["user_id", "'ada'", "frozen", "thawed", "'bo'"]
    for whose in (ada, ("--all",)):
        assert run("thaw", *whose).out.startswith("thawed: ")
        assert run("thaw", *whose, code=2).err.startswith("langchain-quota quotas: not frozen: ")
    assert store.acquire(calls(ADA, 1)).admitted == (True,)
    said = "langchain-quota quotas: warning: this may stop nobody, because no count has --{}\n"
    for per, subject, nearest in (
        *(("user_id", "ada", ""), ("user_id", "ade", "subject 'ade' now; nearest: 'ada'")),
        ("userid", "ada", "per 'userid' now; nearest: 'user_id'"),
    ):
        shown = run("freeze", "--per", per, "--subject", subject)
        assert shown.out.startswith(f"frozen: the calls of {per} '{subject}' since ")
        assert shown.err == (said.format(nearest) if nearest else "")
    for frozen, thawed in permutations((LONG, unquote(SHORTENED[15:]))):
        run("freeze", "--per", "user_id", "--subject", frozen)
        assert store.acquire(calls(SHORTENED, 1)).frozen == (SHORTENED,)
        assert run("thaw", "--per", "user_id", "--subject", thawed).out.startswith("thawed: ")


def test_who_grants(run: Run, store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it is the system's user, also where no variable names her; or nobody known."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    user = pwd.getpwuid(os.getuid()).pw_name
    run("grant", *OF_ADA, "1", "--id", "a")
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 2)
    run("grant", *OF_ADA, "1", "--id", "b")
    assert {each.id: each.by for each in store.grants()} == {"a": user, "b": ""}


def test_revoke(run: Run, store: RedisStore) -> None:
    """A grant ends now, and its id is used up; another key's with this id goes on."""
    adam = f"{ADA}m"
    store.grant(adam, 9, window=None, id="4711")
    run("revoke", *OF_ADA, "--id", "4711", code=2)
    store.grant(ADA, 50, window=None, id="4711")
    several = f"several match: add --key {ADA} (until reset) or --key {adam} (until reset)"
    assert several in run("revoke", "--id", "4711", code=2).err
    revoking = ("revoke", *OF_ADA, "--id", "4711")
    assert run(*revoking).out.startswith("revoked 50 calls of tool:search to user_id 'ada'")
    assert run("grants", *OF_ADA).out == "no grants\n"
    assert "the id '4711': one of tool:search to user_id 'adam'" in run(*revoking, code=2).err
    said = run("grant", *OF_ADA, "50", "--id", "4711", code=2).err
    assert said.startswith("langchain-quota quotas: over already: 50 calls of tool:search to user_")


def test_grant_in_a_window(run: Run, store: RedisStore) -> None:
    """The window that runs is granted more; of several counts, the one that is named."""
    base = "mail:user_id:ada"
    days, hours = (timedelta(days=1), "a"), (timedelta(hours=1), "b")
    granting = ("grant", *count("tool:mail", "user_id", "ada"), "7")
    store.grant(base, 5, window=days[0], id=days[1])
    run(*granting)
    today = f"{base}:86400:{int(time.time()) // 86_400}"
    granted = {(each.key, each.amount) for each in store.grants()}
    assert granted <= {(today, 5), (today, 7)}
    hourly = store.grant(base, 5, window=hours[0], id=hours[1])
    [several] = re.findall(r"several match: add (.*)", run(*granting, code=2).err)
    assert re.findall(r"--key (\S*) \(until ", several) == [hourly.key, today]
    run(*granting, "--key", hourly.key)
    assert sorted(each.amount for each in store.grants(f"{base}:3600:*")) == [5, 7]
    run("revoke", "--subject", "ada", "--id", "b")


def test_a_window_of_the_calendar(run: Run, store: RedisStore) -> None:
    """The present one is granted more; its end is shown in its zone and in UTC."""
    base = "mail:tenant:acme"
    month: Any = Quota(5, per="tenant", window="month", tz="Asia/Kolkata", starts=15).period
    first = store.grant(base, 1, window=month, id="first")
    end = first.until or first.given_at
    store.acquire(batch({first.key: 2}, ends={first.key: int(end.timestamp())}))
    said = run("grant", *count("tool:mail", "tenant", "acme"), "5", "--id", "a").out
    until = f"{end.astimezone(ZoneInfo('Asia/Kolkata'))} ({end:%Y-%m-%d %H:%M:%S} UTC)"
    assert f" to tenant 'acme' until {until}, by " in said
    assert " 00:00:00+05:30 (" in until
    assert store.grant(base, 5, window=month, id="a").key == first.key
    for action in ("show", "grants"):
        assert until in run(action, "--limit", "tool:mail").out.splitlines()[1]


def test_bad_grants(run: Run, store: RedisStore, capsys: Capture) -> None:
    """What cannot be granted is refused in one line."""
    with pytest.raises(SystemExit) as ended:
        run("grant", *OF_ADA, "5", "--for", "9999999d")
    assert ended.value.code == 2
    assert "'9999999d'" in capsys.readouterr().err.splitlines()[-1]
    store.reset([f"model.{each}:user_id:ada" for each in ("nanodollars", "milliseconds")])
    for limit, arguments, message in (
        ("tool:search", "0", "amount must be above 0"),
        *(("tool:search", each, "amount must be a whole number") for each in ("five", "\u0663")),
        ("cost", "\u0663", "amount must be a number of dollars"),
        ("cost", "much", "amount must be dollars in digits"),
        ("time", "5x", "amount must be a time such as"),
        ("tool:search", "5 --id=", "id must not be empty"),
    ):
        asked = (*count(limit, "user_id", "ada"), *arguments.split())
        [line] = run("grant", *asked, code=2).err.splitlines()
        assert message in line


def test_a_lost_answer(run: Run, store: RedisStore, redis_server: RedisServer) -> None:
    """Who does not hear whether it is granted reads how to ask again, and it is granted once."""
    asked = (*OF_ADA, "50")
    with proxy(redis_server.port) as way:
        way.fail(only_small)
        reason = run("grant", *asked, "--store", way.url, code=2).err
    *_, name = reason.split()
    assert reason.endswith(f"; to try again without granting twice add --id {name}\n")
    assert run("grant", *asked, "--id", name).out.startswith("granted 50 calls")
    assert [each.amount for each in store.grants()] == [50]


def only_small(reply: bytes) -> Iterator[bytes]:
    """What Redis says arrives, but not that it has written a grant."""
    if b"written" in reply:
        raise ConnectionResetError
    yield reply

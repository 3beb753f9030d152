"""Limits that ask a person: with real checkpointers, a real Redis, and processes that end."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import pytest

# Among the oldest versions there is none.
pytest.importorskip("langgraph.checkpoint.postgres")

from langchain_quota import QuotaMiddleware, QuotaStoreError, RedisStore, ToolCallLimit
from langchain_quota.middleware._answers import KEPT
from tests.forked import Program, as_module, start_python
from tests.scene import Form, Scene, both_forms
from tests.servers.asking import APPROVE, GRANT, LIMIT, Moment, Order, diary, ran
from tests.servers.postgres import PostgresServer
from tests.servers.prometheus import eventually
from tests.servers.redis import RedisServer
from tests.signals import Signals

IMPORTED = ("redis.asyncio", "langgraph.checkpoint.postgres.aio")
"""What each process imports, too."""
PATIENCE = 60
"""Seconds after which a process that should have ended is taken to be lost."""
KILLED = -9
UNCHECKED = (
    "Tool call limit could not be checked, so the call of 'search' was not run. Try again later."
)

Found = dict[str, Any]


@dataclass
class Life:
    """A process that runs: what it writes, and its end."""

    program: Program
    output: IO[bytes]
    errors: IO[bytes]

    def end(self) -> int:
        """Wait for its end: its exit code."""
        return self.program.wait(PATIENCE)

    def found(self) -> list[Found]:
        """What became of its threads."""
        code = self.end()
        self.output.seek(0)
        assert code == 0, self.log
        found: list[Found] = json.loads(self.output.read())
        return found

    @property
    def log(self) -> str:
        """What it has logged."""
        self.errors.seek(0)
        return self.errors.read().decode()


@contextmanager
def started(order: Order) -> Iterator[Life]:
    """A process that does what an order says."""
    with (
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
        start_python(
            as_module("tests.servers.asking"),
            order.json(),
            stdout=output.fileno(),
            stderr=errors.fileno(),
            imported=IMPORTED,
        ) as program,
    ):
        yield Life(program, output, errors)


def done(order: Order) -> Found:
    """What became of the only thread of an order that a process of its own does."""
    with started(order) as life:
        (found,) = life.found()
    return found


def resumed(order: Order, resume: Any = APPROVE) -> Order:
    """The order to go on with a run."""
    return replace(order, text="", resume=resume)


def offered(found: Found) -> dict[str, Any]:
    """How much more the question of a thread offers, by limit."""
    (question,) = found["asked"]
    (action,) = question["action_requests"]
    args: dict[str, Any] = action["args"]
    return args


@dataclass
class Shared:
    """A user's day in Redis."""

    server: RedisServer
    prefix: str
    store: RedisStore = field(init=False)

    def __post_init__(self) -> None:
        self.store = RedisStore(self.server.url, prefix=self.prefix, timeout=30)

    @property
    def used(self) -> int:
        return sum(each.used for each in self.store.usages())

    @property
    def granted(self) -> list[int]:
        return [each.amount for each in self.store.grants()]

    @contextmanager
    def down(self) -> Iterator[None]:
        """The server answers nobody, and hears what it is asked when it goes on."""
        self.server.pause()
        try:
            yield
        finally:
            self.server.resume()


@pytest.fixture
def shared(redis_server: RedisServer) -> Iterator[Shared]:
    """A count that no other test has."""
    shared = Shared(redis_server, redis_server.prefix())
    with closing(shared.store):
        yield shared


@pytest.fixture
def order(shared: Shared, tmp_path: Path) -> Order:
    """A run that asks at its third search, whose calls are counted in Redis."""
    return Order(
        folder=str(tmp_path),
        text=f"{LIMIT} 1",
        saver=str(tmp_path / "threads.db"),
        redis=shared.server.url,
        prefix=shared.prefix,
    )


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_resumed_by_another_process(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What a process has asked is answered in the next one, which grants; a third asks again."""
    saver = str(tmp_path / "threads.db")
    if kind == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        saver = server.database()
    order = Order(folder=str(tmp_path), text="1 2", saver=saver)

    first = done(order)
    assert offered(first) == {"tool:search": GRANT}
    assert (first["answers"], first["used"]) == (["found"], 1)

    second = done(resumed(order))
    assert (second["asked"], second["last"]) == ([], "done")
    assert (second["answers"], second["used"]) == (["found"] * 3, 3)

    third = done(replace(order, text=str(GRANT)))
    assert offered(third) == {"tool:search": GRANT}
    assert third["used"] == 3
    assert len(ran(tmp_path)) == 3


@pytest.mark.parametrize("at", ["grants", "granted", "judged"])
def test_resumed_twice_at_once(shared: Shared, order: Order, tmp_path: Path, at: Moment) -> None:
    """A question that two processes are resumed with at once grants once, and is charged once."""
    assert offered(done(order)) == {"tool:search": GRANT}
    with started(replace(resumed(order), at=at, what="waits")) as first:
        eventually(lambda: diary(tmp_path, "reached"))
        with started(resumed(order)) as second:
            found = second.found()
            logs = second.log
        (tmp_path / "go").touch()
        found += first.found()
        logs += first.log

    assert [each["error"] for each in found] == ["", ""]
    assert shared.granted == [GRANT]
    assert logs.count("granted under") == 1
    assert shared.used == LIMIT + 1
    # LangGraph may run the step in both processes.
    assert len(set(ran(tmp_path))) == LIMIT + 1


def test_many_callers_approve(shared: Shared, order: Order, tmp_path: Path) -> None:
    """A hundred runs of a user in four processes never exceed the limit and what is granted."""
    with ExitStack() as running:
        lives = []
        for worker in range(4):
            threads = tuple(f"{worker}-{n}" for n in range(25))
            mine = replace(order, text="1 2", saver="", threads=threads, approves=True)
            lives.append(running.enter_context(started(mine)))
        found = [each for life in lives for each in life.found()]

    ids = Counter(each.id for each in shared.store.grants())
    assert ids.most_common(1)[0][1] == 1
    calls = ran(tmp_path)
    assert len(calls) == shared.used <= LIMIT + sum(shared.granted)
    answers = Counter(text for each in found for text in each["answers"])
    assert answers["found"] == len(calls)
    assert answers.total() == 100 * 3


@pytest.mark.parametrize(
    ("at", "again"), [("granted", APPROVE), ("judged", APPROVE), ("judged", None)]
)
def test_killed_after_the_answer(
    shared: Shared, order: Order, tmp_path: Path, at: Moment, again: Any
) -> None:
    """A process that is killed between grant and call has granted once, and loses no call."""
    done(order)
    with started(replace(resumed(order), at=at)) as life:
        assert life.end() == KILLED

    found = done(resumed(order, again))
    assert (found["asked"], found["last"], found["error"]) == ([], "done", "")
    assert shared.granted == [GRANT]
    assert shared.used == len(ran(tmp_path)) == LIMIT + 1


def test_killed_before_a_model_call(shared: Shared, order: Order, tmp_path: Path) -> None:
    """A model call that was granted, and judged, before its process was killed is charged once."""
    order = replace(order, text="1 1", counts="model")
    assert offered(done(order)) == {"model": GRANT}
    with started(replace(resumed(order), at="judged")) as life:
        assert life.end() == KILLED

    found = done(resumed(order, None))
    assert (found["last"], found["error"]) == ("done", "")
    assert (shared.used, shared.granted) == (LIMIT + 1, [GRANT])
    assert len(ran(tmp_path)) == 2


REJECT = {"decisions": [{"type": "reject", "message": "Not today."}]}


@pytest.mark.parametrize(
    ("outage", "answer", "last"), [("deny", APPROVE, "done"), ("allow", REJECT, "Not today.")]
)
def test_answered_while_the_store_is_down(
    shared: Shared, order: Order, outage: Any, answer: Any, last: str
) -> None:
    """An answer that comes while the store is down is kept: the run is resumed again without it."""
    order = replace(order, outage=outage)
    done(order)
    with shared.down():
        found = done(replace(resumed(order, answer), timeout=0.2))
    assert found["error"] == f"QuotaStoreError: {KEPT}"
    assert shared.used == len(ran(Path(order.folder))) == LIMIT

    found = done(resumed(order, None))
    assert (found["last"], found["error"]) == (last, "")
    approved = answer is APPROVE
    assert shared.used == len(ran(Path(order.folder))) == LIMIT + approved
    assert shared.granted == [GRANT] * approved


@both_forms
async def test_kept_in_both_forms(form: Form, shared: Shared, signals: Signals) -> None:
    """The sync and the async form keep an answer while the store is down."""
    limit = ToolCallLimit("search", thread_limit=1, exit_behavior="ask")
    made = RedisStore(shared.server.url, prefix=shared.prefix, timeout=0.2)
    # Each form has connections of its own.
    with closing(made) as store:
        quota = QuotaMiddleware[Any, Any]([limit], store=store, telemetry=signals.telemetry)
        scene = Scene(signals, [["search"] * 2, "done"], [quota], form=form)
        await scene.play()
        with shared.down(), pytest.raises(QuotaStoreError, match=KEPT):
            await scene.resume(APPROVE)
        await scene.go_on()
        await store.aclose()
    assert (scene.ran, shared.granted) == (["search"] * 2, [1])


@pytest.mark.parametrize(("outage", "answer"), [("deny", UNCHECKED), ("allow", "found")])
def test_nobody_is_asked_while_the_store_is_down(
    shared: Shared, order: Order, outage: Any, answer: str
) -> None:
    """A run that reaches no store goes on as without a person, and asks when the store is back."""
    with shared.down():
        found = done(replace(order, text=f"{LIMIT + 1}", outage=outage, timeout=0.2))
    assert (found["asked"], found["last"], found["error"]) == ([], "done", "")
    assert found["answers"] == [answer] * (LIMIT + 1)
    assert offered(done(replace(order, text=f"{LIMIT + 1}", outage=outage)))


@pytest.mark.parametrize("at", ["grants", "granted"])
def test_the_store_goes_down_after_the_answer(
    shared: Shared, order: Order, tmp_path: Path, at: Moment
) -> None:
    """What the server hears of an answer after its client has given up is done once."""
    done(order)
    try:
        found = done(
            replace(
                resumed(order), at=at, what="stops the store", store=shared.server.pid, timeout=0.2
            )
        )
    finally:
        shared.server.resume()
    assert found["error"] == f"QuotaStoreError: {KEPT}"

    found = done(resumed(order, None))
    assert (found["last"], found["error"]) == ("done", "")
    assert len(ran(tmp_path)) == shared.used == LIMIT + 1
    assert shared.granted == [GRANT]


def test_answered_when_the_store_has_forgotten(
    shared: Shared, order: Order, tmp_path: Path
) -> None:
    """Where there is room again nothing is granted: an answer is not needed, whatever it is."""
    done(order)
    with shared.server.client() as client:
        client.flushdb()
    found = done(resumed(order, REJECT))
    assert (found["last"], found["error"]) == ("done", "")
    assert len(ran(tmp_path)) == LIMIT + 1
    assert (shared.used, shared.granted) == (1, [])


def test_answered_in_the_next_window(shared: Shared, order: Order, tmp_path: Path) -> None:
    """After the window's end the new one counts; an answer grants there, if it is still needed."""
    order = replace(order, text=f"{LIMIT} {LIMIT + 1} 1")
    done(order)
    found = done(replace(resumed(order), ahead=86_400))
    assert (found["last"], found["error"]) == ("done", "")
    today, tomorrow = (each.used for each in shared.store.usages())
    assert (today, tomorrow) == (LIMIT, LIMIT + 2)
    (grant,) = shared.store.grants()
    assert grant.key == shared.store.usages()[1].key
    assert len(ran(tmp_path)) == LIMIT + LIMIT + 2


def amount(given: object) -> dict[str, Any]:
    """An approval with another amount than the question offers."""
    return {"decisions": [{"type": "approve", "amount": given}]}


def test_unusable_answers(shared: Shared, order: Order, tmp_path: Path) -> None:
    """What cannot be used is asked again, and the next answer is read, whichever process asks."""
    done(order)
    # Redis could not keep so much: the run could never go on.
    found = done(resumed(order, amount(10**15 + 1)))
    (question,) = found["asked"]
    (action,) = question["action_requests"]
    assert '"amount" must be at most 1000000000000000, not' in action["description"]

    found = done(resumed(order, amount(1000)))
    assert (found["last"], found["error"]) == ("done", "")
    assert shared.granted == [1000]
    assert len(ran(tmp_path)) == shared.used == LIMIT + 1


def test_killed_when_a_part_is_granted(shared: Shared, order: Order, tmp_path: Path) -> None:
    """Calls for which a person grants too few run as far as it goes, also after a kill."""
    order = replace(order, text=f"{LIMIT} 3")
    done(order)
    with started(replace(resumed(order, amount(2)), at="judged")) as life:
        assert life.end() == KILLED

    found = done(resumed(order, None))
    assert (found["asked"], found["last"], found["error"]) == ([], "done", "")
    assert found["answers"].count("found") == LIMIT + 2
    assert len(found["answers"]) == LIMIT + 3
    assert len(ran(tmp_path)) == shared.used == LIMIT + 2

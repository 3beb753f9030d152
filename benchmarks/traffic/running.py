"""Runs the service: its processes, its store, and the users who ask."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex

from benchmarks.traffic import incidents
from benchmarks.traffic.agents import Profile, Question, questions
from benchmarks.traffic.truth import Truth
from langchain_quota import PostgresStore
from tests.forked import ROOT, as_module, start_python
from tests.server.postgres import running_postgres
from tests.server.prometheus import DEADLINE
from tests.server.proxy import Proxy, proxy
from tests.server.redis import running_redis


class _Process:
    """A process of a replica: what it is asked, and what it has not answered yet.

    Args:
        order: What `benchmarks.traffic.replica` needs to know.
        log: Where it writes its errors.
        seconds: After how long it is ended, come what may.
    """

    def __init__(self, order: Mapping[str, object], log: Path, seconds: int) -> None:
        questions_read, questions_written = os.pipe()
        answers_read, answers_written = os.pipe()
        self._log = log
        self.questions = os.fdopen(questions_written, "w", buffering=1)
        self.answers = os.fdopen(answers_read)
        with log.open("ab") as errors:
            self.program = start_python(
                as_module("benchmarks.traffic.replica"),
                json.dumps(order),
                stdin=questions_read,
                stdout=answers_written,
                stderr=errors.fileno(),
                cwd=ROOT,
                imported=("langgraph.checkpoint.sqlite.aio", "redis.asyncio"),
                seconds=seconds,
            )
        os.close(questions_read)
        os.close(answers_written)
        self.listening: Future[None]
        self.asked: dict[int, str] = {}
        self.ready = False
        self.killed = False

    def started(self) -> int:
        """Wait until it serves: its port."""
        line = self.answers.readline()
        assert line, self.failure()
        self.ready = True
        return int(line)

    def ask(self, number: int, question: Question) -> None:
        """Let it answer a question."""
        self.asked[number] = question.thread
        self.questions.write(json.dumps([number, *question]) + "\n")

    def no_more(self) -> None:
        """Let it end when it has answered everything."""
        self.questions.close()

    def failure(self) -> str:
        """Wait for its end: why it ended before its time, if it did."""
        code = self.program.wait(DEADLINE)
        return "" if code == 0 or self.killed else f"it ended with {code}: {self._log.read_text()}"

    def kill(self) -> None:
        """End it at once, if it has not ended: who listens waits for its end."""
        self.killed = True
        self.no_more()
        if not self.listening.done():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.program.pid, signal.SIGKILL)
        self.listening.result(DEADLINE)


class Traffic:
    """A running service with users; `running_traffic` makes it.

    Args:
        asked: What users ask.
        order: What all replicas need to know.
        directory: Where the processes write.
        redis: The replicas' way to the store.
        lifetime: After how many seconds a replica ends, come what may.

    Attributes:
        targets: Where the replicas serve their metrics, as `host:port`.
        discovery: The file that tells Prometheus these targets.
        redis: The replicas' way to the store.
        events: What happens when users ask, by the simulated second.
        begun: When users began to ask, by the clock.
        scrape: Waits until all that the replicas counted before was scraped; a restart calls it
            before it kills.
    """

    def __init__(
        self,
        asked: list[Question],
        order: Mapping[str, object],
        directory: Path,
        redis: Proxy,
        lifetime: int,
    ) -> None:
        self.redis = redis
        self.events: dict[float, Callable[[], object]] = {}
        self.scrape: Callable[[], None] | None = None
        self.targets: tuple[str, ...] = ()
        self.discovery = directory / "targets.json"
        self._asked = asked
        self._order = order
        self._directory = directory
        self._lifetime = lifetime
        self._changed = threading.Condition()
        self._processes: list[_Process] = []
        self._number = 0
        self._failures: list[str] = []
        self._over = False
        self._threads = ThreadPoolExecutor(max_workers=64)
        self._asking: list[Future[None]] = []
        self._speed = float(str(order["speed"]))
        self._began = 0.0
        self.begun = 0.0

    def begin(self) -> None:
        """Let users ask, and events happen."""
        self._began, self.begun = time.monotonic(), time.time()
        self._asking = [self._threads.submit(each) for each in (self._ask_all, self._happen)]

    def wait(self) -> None:
        """Wait until all is asked and answered, and all events have happened."""
        for each in self._asking:
            each.result(self._lifetime)
        self._wait_until(lambda: not any(each.asked for each in self._processes))

    def truth(self) -> Truth:
        """What has happened so far."""
        return Truth.read(self._directory)

    def restart(self, replica: int = 0, *, elsewhere: bool = False) -> None:
        """Kill a replica that has answered everything and was scraped, and start it again.

        Args:
            replica: Its number, from 0.
            elsewhere: Whether it gets another port, as a deployment gives it another address.
        """
        process = self._processes[replica]
        with self._changed:
            process.ready = False
        self._wait_until(lambda: not process.asked)
        if self.scrape is not None:
            self.scrape()
        process.kill()
        self.start(replica, elsewhere=elsewhere)

    def deploy(self) -> None:
        """Replace one replica after the other by a process at another address."""
        for replica in range(len(self._processes)):
            self.restart(replica, elsewhere=True)

    def start(self, replica: int, *, elsewhere: bool = True) -> None:
        """Start a replica, again or for the first time, on its port or elsewhere."""
        own = {
            "journal": str(self._directory / f"{token_hex(8)}.jsonl"),
            "port": 0 if elsewhere else int(self.targets[replica].split(":")[1]),
        }
        log = self._directory / f"replica-{replica}.log"
        process = _Process({**self._order, **own}, log, self._lifetime)
        port = process.started()
        targets = [*self.targets]
        targets[replica : replica + 1] = [f"127.0.0.1:{port}"]
        self.targets = tuple(targets)
        # Prometheus reads the file when it is replaced, and must not read half of it.
        draft = self.discovery.with_suffix(".draft")
        draft.write_text(json.dumps([{"targets": targets}]))
        draft.replace(self.discovery)
        process.listening = self._threads.submit(self._listen, process)
        self._processes[replica : replica + 1] = [process]
        with self._changed:
            self._changed.notify_all()

    def kill(self) -> None:
        """Kill all replicas; nobody may ask any more."""
        for process in self._processes:
            process.kill()

    def end(self) -> None:
        """Let nobody ask any more, and end the replicas."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        try:
            for process in self._processes:
                process.no_more()
                process.listening.result(DEADLINE)
        finally:
            for process in self._processes:
                process.kill()
            self._threads.shutdown()
        assert not self._failures, self._failures

    def _listen(self, process: _Process) -> None:
        """Take a process' answers until it ends."""
        with process.answers:
            for line in process.answers:
                with self._changed:
                    process.asked.pop(int(line), None)
                    self._changed.notify_all()
        if failure := process.failure():
            with self._changed:
                self._failures.append(failure)
                self._changed.notify_all()

    def _ask_all(self) -> None:
        """Ask what is to be asked, when its time has come."""
        for question in self._asked:
            self._pause_until(question.at)
            self._ask(question)

    def _ask(self, question: Question) -> None:
        """Ask a replica in turn that is ready, when the thread is at rest."""
        with self._changed:
            self._wait_until(
                lambda: (
                    self._at_rest(question.thread) and any(each.ready for each in self._processes)
                )
            )
            ready = [process for process in self._processes if process.ready]
            self._number += 1
            ready[self._number % len(ready)].ask(self._number, question)

    def _happen(self) -> None:
        for at, event in sorted(self.events.items()):
            self._pause_until(at)
            event()

    def _now(self) -> float:
        return (time.monotonic() - self._began) * self._speed

    def _at_rest(self, thread: str) -> bool:
        return not any(thread in process.asked.values() for process in self._processes)

    def _pause_until(self, at: float) -> None:
        with self._changed:
            while not self._over and (left := (at - self._now()) / self._speed) > 0:
                self._changed.wait(left)
        self._check()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            happened = self._changed.wait_for(
                lambda: self._over or self._failures or condition(), DEADLINE
            )
        self._check()
        assert happened, f"the replicas have not answered for {DEADLINE} seconds"

    def _check(self) -> None:
        assert not self._failures, self._failures
        assert not self._over, "the traffic was ended early"


@contextmanager
def running_traffic(
    profile: Profile = "healthy",
    *,
    seconds: float,
    directory: Path,
    speed: float = 1,
    replicas: int = 2,
    threads: int = 70,
    seed: int = 1,
) -> Iterator[Traffic]:
    """Run the service; `Traffic.begin` lets users ask. It stops all that it has started.

    Args:
        profile: What the traffic is like. `healthy`: nobody is refused. `busy`: some threads are
            near their limits and some use them up, and a limit refuses a fifth of its calls, as it
            is meant to. `loop`: an agent keeps calling a tool that is refused, on some threads.
            `broken`: the store is lost for a while. `incidents`: what the module of that
            name tells, for half an hour.
        seconds: How long users ask, in simulated seconds.
        directory: Where the processes write; an empty one.
        speed: How many simulated seconds pass in a real one. Windows of quotas are as much shorter,
            at least a second.
        replicas: How many processes serve.
        threads: How many threads there are; they belong to 20 users of 4 tenants.
        seed: What users ask is the same for the same seed.
    """
    asked = questions(profile, seconds=seconds, threads=threads, seed=seed)
    if profile == "incidents":
        asked = sorted([*asked, *incidents.questions()])
    with ExitStack() as servers:
        server = servers.enter_context(running_redis(directory / "redis"))
        redis = servers.enter_context(proxy(server.port))
        second, plans = None, ""
        if profile == "incidents":
            second = servers.enter_context(running_postgres())
            plans = second.database()
            PostgresStore(plans).setup()
        order = {
            "redis": redis.url,
            "postgres": plans,
            "checkpoints": str(directory / "checkpoints.sqlite"),
            "speed": speed,
            # Nobody waits for a store that is lost; a busy machine may be slow to answer.
            "timeout": {"broken": 0.25, "incidents": 1}.get(profile, 5),
        }
        lifetime = round(2 * seconds / speed + 10 * DEADLINE)
        traffic = Traffic(asked, order, directory, redis, lifetime)
        if profile == "broken":
            traffic.events |= {seconds * 0.2: redis.blackhole, seconds * 0.45: redis.heal}
        if second is not None:
            (lost, back), (stopped, resumed) = incidents.OUTAGES.values()
            traffic.events |= {lost: redis.blackhole, back: redis.heal}
            traffic.events |= {stopped: second.pause, resumed: second.resume}
            traffic.events |= {incidents.RESTART: traffic.restart, incidents.DEPLOY: traffic.deploy}
            traffic.events |= incidents.operations(redis.url)
        else:
            traffic.events[seconds * 0.5] = traffic.restart
        try:
            for replica in range(replicas):
                traffic.start(replica)
            yield traffic
        finally:
            traffic.end()

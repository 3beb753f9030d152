"""A real Redis server of a test's own, and a way to it on which requests can be held up."""

import signal
import socket
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from langchain_quota.stores.redis_script import SCRIPTS, Script
from tests.server.programs import required_program
from tests.server.prometheus import DEADLINE, eventually
from tests.server.proxy import Proxy, proxy
from tests.stores import Clock

_SCRIPTS = dict(SCRIPTS)
"""The scripts with the server's own clock."""


class RedisServer:
    """A server on a free port, without persistence; `{port}` in its options is the port."""

    def __init__(self, directory: Path, *options: str) -> None:
        self._program = required_program("redis-server", "redis-server")
        self._directory = directory
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.socket = directory / "redis.sock"
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The id of its process."""
        assert self._process is not None
        return self._process.pid

    def client(self, **options: Any) -> redis.Redis:
        """A client beside the store."""
        # By default redis-py gives up after 5 seconds, which a busy machine may need.
        patient = {"socket_timeout": DEADLINE, "retry": Retry(NoBackoff(), 0)}
        return redis.Redis(unix_socket_path=str(self.socket), **{**patient, **options})

    def prefix(self) -> str:
        """A prefix that no other test has."""
        return f"test.{uuid.uuid4().hex}"

    def start(self) -> None:
        """Start it: the first time on a free port, later on the same one."""
        eventually(self._started)

    def stop(self) -> None:
        """Stop it, and with it all that it knows."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Let it answer nobody, with its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on, with what it was sent meanwhile."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _started(self) -> bool:
        port = self.port or free_port()
        self.socket.unlink(missing_ok=True)
        command = [
            self._program,
            *("--bind", "127.0.0.1", "--port", str(port), "--unixsocket", str(self.socket)),
            *("--dir", str(self._directory), "--save", "", "--appendonly", "no"),
            *(option.format(port=port) for option in self._options),
        ]
        with (self._directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        if eventually(self._answers_or_ended) == "ended":  # another took the port
            self.stop()
            return False
        self.port = port
        return True

    def _answers_or_ended(self) -> str | None:
        assert self._process is not None
        if self._process.poll() is not None:
            return "ended"
        # On its own socket: on the port another server could answer.
        with suppress(redis.exceptions.ConnectionError), self.client() as client:
            client.ping()
            return "answers"
        return None


@contextmanager
def running_redis(directory: Path, *options: str) -> Iterator[RedisServer]:
    """Run a server."""
    directory.mkdir(parents=True, exist_ok=True)
    server = RedisServer(directory, *options)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Detour = Proxy


@contextmanager
def detour(server: RedisServer, *, hold: bytes) -> Iterator[Detour]:
    """A way to a server on which requests with this in them are held up."""
    with proxy(server.port, hold) as way:
        yield way


@contextmanager
def time_from(key: str) -> Iterator[None]:
    """Have RedisStores of this process read the time from keys of their server."""
    with pytest.MonkeyPatch.context() as patch:
        for name, script in _SCRIPTS.items():
            assert "redis.call('TIME')[1]" in script.text
            text = script.text.replace("redis.call('TIME')[1]", f"redis.call('GET', '{key}')")
            micros = f"(redis.call('GET', '{key}:micros') or 0)"
            text = text.replace("redis.call('TIME')[2]", micros)
            patch.setitem(SCRIPTS, name, Script.of(text.replace("'EX', ", "'EXAT', now + ")))
        yield


def let_pass(client: redis.Redis, key: str, clock: Clock, seconds: float) -> None:
    """Move the time of `time_from`, and a clock; what ends meanwhile is gone, as Redis does it."""
    clock.now += seconds
    client.mset({key: int(clock.now), f"{key}:micros": int(clock.now % 1 * 10**6)})
    for name in client.scan_iter(count=1000):
        if 0 <= client.expiretime(name) <= clock.now:
            client.delete(name)

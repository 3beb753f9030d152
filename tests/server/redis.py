"""A real Redis server of a test's own, whose time and scripts a test may change."""

import os
import signal
import socket
import subprocess
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
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
from tests.stores import Clock

_SCRIPTS = dict(SCRIPTS)
"""The scripts with the server's own clock."""


class Database(ABC):
    """A server on a free port, which a test may stop, and start again on the same one."""

    def __init__(self, directory: Path, user: str | None = None) -> None:
        self._directory, self._user = directory, user
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @abstractmethod
    def command(self, port: int) -> list[str]:
        """What runs it."""

    @abstractmethod
    def answers(self, port: int) -> bool:
        """Whether it answers on its own socket: on the port another server could answer."""

    @property
    def pid(self) -> int:
        """The id of its process."""
        assert self._process is not None
        return self._process.pid

    def prefix(self) -> str:
        """A prefix that no other test has."""
        return f"test.{uuid.uuid4().hex}"

    def start(self) -> None:
        """Start it: the first time on a free port, later on the same one."""
        eventually(self._started)

    def stop(self, sign: int = signal.SIGKILL) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.send_signal(sign)
            self._process.wait()
            self._process = None

    def _started(self) -> bool:
        port = self.port or free_port()
        with (self._directory / "log").open("ab") as log:
            given: Any = {"cwd": self._directory, "user": self._user, "stdout": log, "stderr": log}
            process = self._process = subprocess.Popen(self.command(port), **given)
        eventually(lambda: process.poll() is not None or self.answers(port))
        if process.poll() is not None:  # another took the port
            self._process = None
            return False
        self.port = port
        return True


class RedisServer(Database):
    """A server without persistence; `{port}` in its options is the port."""

    def __init__(self, directory: Path, *options: str) -> None:
        super().__init__(directory)
        self._program = required_program("redis-server", "redis-server")
        self._options = options
        self.socket = directory / "redis.sock"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self, **options: Any) -> redis.Redis:
        """A client beside the store."""
        # By default redis-py gives up after 5 seconds, which a busy machine may need.
        patient = {"socket_timeout": DEADLINE, "retry": Retry(NoBackoff(), 0)}
        return redis.Redis(unix_socket_path=str(self.socket), **{**patient, **options})

    def pause(self) -> None:
        """Let it answer nobody, with its connections open."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on, with what it was sent meanwhile."""
        os.kill(self.pid, signal.SIGCONT)

    def command(self, port: int) -> list[str]:
        self.socket.unlink(missing_ok=True)
        return [
            self._program,
            *("--bind", "127.0.0.1", "--port", str(port), "--unixsocket", str(self.socket)),
            *("--dir", str(self._directory), "--save", "", "--appendonly", "no"),
            *(option.format(port=port) for option in self._options),
        ]

    def answers(self, port: int) -> bool:
        with suppress(redis.exceptions.ConnectionError), self.client() as client:
            return bool(client.ping())
        return False


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


@contextmanager
def scripts_with(changes: Mapping[str, str]) -> Iterator[None]:
    """Have RedisStores of this process send scripts in which texts stand in place of others."""
    assert all(any(old in script.text for script in _SCRIPTS.values()) for old in changes)
    with pytest.MonkeyPatch.context() as patch:
        for name, script in _SCRIPTS.items():
            text = script.text
            for old, new in changes.items():
                text = text.replace(old, new)
            patch.setitem(SCRIPTS, name, Script.of(text))
        yield


@contextmanager
def time_from(key: str) -> Iterator[None]:
    """Have RedisStores of this process read the time from keys of their server."""
    changes = {
        "redis.call('TIME')": f"{{redis.call('GET', '{key}'), "
        f"redis.call('GET', '{key}:micros') or 0}}",
        "'EX', ": "'EXAT', now + ",
    }
    with scripts_with(changes):
        yield


def let_pass(client: redis.Redis, key: str, clock: Clock, seconds: float) -> None:
    """Move the time of `time_from`, and a clock; what ends meanwhile is gone, as Redis does it."""
    clock.now += seconds
    client.mset({key: int(clock.now), f"{key}:micros": int(clock.now % 1 * 10**6)})
    for name in client.scan_iter(count=1000):
        if 0 <= client.expiretime(name) <= clock.now:
            client.delete(name)

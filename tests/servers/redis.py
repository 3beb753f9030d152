"""A real Redis server of a test's own, and a way to it on which requests can be held up."""

import signal
import socket
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha1
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from langchain_quota.stores.redis_script import SCRIPT
from tests.servers.programs import required_program
from tests.servers.prometheus import eventually


class RedisServer:
    """A server on a free port, without persistence; it can be paused, stopped and started.

    Args:
        directory: Where its socket and its files are.
        options: Further arguments of `redis-server`; `{port}` in them is the port.
    """

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
        return redis.Redis(
            unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0), **options
        )

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


class Detour:
    """A way to a server on which a request can be held up, and that remembers the answers.

    A request on the way arrives even when its sender has gone.

    Args:
        server: Where it leads.
        hold: Requests with this in them are held up.
    """

    def __init__(self, server: RedisServer, hold: bytes) -> None:
        self._to = ("127.0.0.1", server.port)
        self._hold = hold
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends = ExitStack()
        self._ends.callback(self._listener.close)
        self._open = threading.Event()
        self.held = threading.Event()
        self.answers = bytearray()
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def open(self) -> None:
        """Let through what was held up, and all that comes."""
        self._open.set()

    def end(self) -> None:
        """Let nobody pass any more."""
        self._open.set()
        with suppress(OSError):  # wakes who waits for a connection
            self._listener.shutdown(socket.SHUT_RDWR)
        # What it accepts last is closed, too.
        self._accepting.join()
        self._ends.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
                self._ends.callback(near.close)
                self._ends.callback(far.close)
                threading.Thread(target=self._forth, args=(near, far), daemon=True).start()
                threading.Thread(target=self._back, args=(far, near), daemon=True).start()

    def _forth(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while request := near.recv(65_536):
                if self._hold in request:
                    self.held.set()
                    self._open.wait()
                far.sendall(request)

    def _back(self, far: socket.socket, near: socket.socket) -> None:
        with suppress(OSError):
            while answer := far.recv(65_536):
                self.answers += answer
                with suppress(OSError):  # the sender has gone
                    near.sendall(answer)


@contextmanager
def detour(server: RedisServer, *, hold: bytes) -> Iterator[Detour]:
    """A way to a server on which some requests are held up."""
    way = Detour(server, hold)
    try:
        yield way
    finally:
        way.end()


@contextmanager
def time_from(key: str) -> Iterator[None]:
    """Have RedisStores of this process read the time, in seconds, from a key of their server."""
    script = SCRIPT
    for clock, other in (
        ("redis.call('TIME')[1]", f"redis.call('GET', '{key}')"),
        ("'EX', ", "'EXAT', now + "),
    ):
        assert clock in script
        script = script.replace(clock, other)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("langchain_quota.stores.redis.SCRIPT", script)
        sha = sha1(script.encode(), usedforsecurity=False).hexdigest()
        patch.setattr("langchain_quota.stores.redis.SHA", sha)
        yield

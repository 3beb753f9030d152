"""A real PostgreSQL server of a test's own."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg

from tests.server.programs import required_program
from tests.server.prometheus import DEADLINE, eventually
from tests.server.redis import free_port

PASSWORD = "a-password-for-tests"  # noqa: S105 - of a server that lives as long as a test

_DEBIAN = Path("/usr/lib/postgresql")
_SUPERUSER = "tester"


class PostgresServer:
    """A server on a free port of the loopback, with a password and without durability."""

    def __init__(self, directory: Path, user: str | None) -> None:
        self._directory = directory
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def start(self) -> None:
        """Make the files, and start the server."""
        password = self._directory / "password"
        password.write_text(PASSWORD)
        if self._user is not None:
            shutil.chown(password, self._user)
        subprocess.run(
            [
                *(_program("initdb"), "--no-sync", "--encoding=UTF8", "--locale=C"),
                *(f"--username={_SUPERUSER}", f"--pwfile={password}"),
                *("--auth-local=trust", "--auth-host=scram-sha-256"),
                f"--pgdata={self._directory / 'data'}",
            ],
            cwd=self._directory,
            user=self._user,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=DEADLINE,
        )
        eventually(self._started)

    def stop(self) -> None:
        """Stop it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)  # at once, with all its processes
            self._process.wait()

    def database(self, encoding: str = "UTF8") -> str:
        """The URL of a new database."""
        name = f"test_{uuid4().hex}"
        self.query(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}'")
        return f"postgresql://{_SUPERUSER}:{PASSWORD}@127.0.0.1:{self.port}/{name}"

    def query(self, query: str) -> list[Any]:
        """The rows of a query, asked as the superuser on the socket."""
        where: Any = {"host": str(self._directory), "port": self.port, "dbname": "postgres"}
        with psycopg.connect(**where, user=_SUPERUSER, autocommit=True) as connection:
            cursor = connection.execute(query.encode())
            return cursor.fetchall() if cursor.description else []

    def _started(self) -> bool:
        self.port = free_port()
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(_program("postgres"), "-D", str(self._directory / "data")),
                    *("-h", "127.0.0.1", "-p", str(self.port), "-k", str(self._directory)),
                    *("-c", "fsync=off", "-c", "full_page_writes=off"),
                ],
                cwd=self._directory,
                user=self._user,
                stdout=log,
                stderr=log,
            )
        return eventually(self._answers_or_ended) == "answers"  # else another took the port

    def _answers_or_ended(self) -> str | None:
        assert self._process is not None
        if self._process.poll() is not None:
            return "ended"
        with suppress(psycopg.OperationalError):
            self.query("SELECT 1")
            return "answers"
        return None


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """Run a server."""
    _program("postgres")  # before anything is looked up that comes with it
    user = _unprivileged()
    # Not pytest's: the path of a socket is short, and another user must get there.
    with tempfile.TemporaryDirectory(prefix="postgres-") as name:
        directory = Path(name)
        if user is not None:
            shutil.chown(directory, user)
        server = PostgresServer(directory, user)
        try:
            server.start()
            yield server
        finally:
            server.stop()


def _unprivileged() -> str | None:
    """Who runs the server, if not who runs the tests: it refuses to be run by root."""
    return None if os.geteuid() else pwd.getpwnam("postgres").pw_name


def _program(name: str) -> str:
    # Debian keeps the server's programs off the PATH.
    newest_first = sorted(_DEBIAN.glob("*/bin"), reverse=True)
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, newest_first)])
    return shutil.which(name, path=path) or required_program(name, "postgresql")

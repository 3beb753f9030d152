"""A real PostgreSQL server of a test's own."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from langchain_quota.stores import postgres
from tests.server.programs import required_program
from tests.server.prometheus import DEADLINE, eventually
from tests.server.redis import Database, free_port

PASSWORD = "a-password-for-tests"  # noqa: S105 - of a server that lives as long as a test

_DEBIAN = Path("/usr/lib/postgresql")
_SUPERUSER = "tester"


class PostgresServer(Database):
    """A server on the loopback, with a password and without durability."""

    def start(self) -> None:
        """Start it: the first time with new files, later with the same ones."""
        if not (self._directory / "data").exists():
            self._make()
        super().start()

    def _make(self) -> None:
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

    def stop(self, sign: int = signal.SIGQUIT) -> None:
        """Stop it at once, with all its processes."""
        super().stop(sign)

    def pause(self, sign: int = signal.SIGSTOP) -> None:
        """Let its processes for connections answer nobody, and it itself take no connection."""
        os.kill(self.pid, sign)
        for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            os.kill(int(child), sign)

    def resume(self) -> None:
        """Let it go on, with what it was sent meanwhile."""
        self.pause(signal.SIGCONT)

    def database(self, encoding: str = "UTF8") -> str:
        """The URL of a new database."""
        name = f"test_{uuid4().hex}"
        self.query(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}'")
        return f"postgresql://{_SUPERUSER}:{PASSWORD}@127.0.0.1:{self.port}/{name}"

    def query(self, query: str, port: int = 0) -> list[Any]:
        """The rows of a query, asked as the superuser on the socket."""
        where: Any = {"host": str(self._directory), "port": port or self.port, "dbname": "postgres"}
        with psycopg.connect(**where, user=_SUPERUSER, autocommit=True) as connection:
            cursor = connection.execute(query.encode())
            return cursor.fetchall() if cursor.description else []

    def command(self, port: int) -> list[str]:
        return [
            *(_program("postgres"), "-D", str(self._directory / "data")),
            *("-h", "127.0.0.1", "-p", str(port), "-k", str(self._directory)),
            *("-c", "fsync=off", "-c", "full_page_writes=off"),
        ]

    def answers(self, port: int) -> bool:
        with suppress(psycopg.OperationalError):
            return bool(self.query("SELECT 1", port))
        return False


@contextmanager
def time_of(clock: Callable[[], float]) -> Iterator[None]:
    """Have PostgresStores of this process take the time, in seconds, from a clock."""

    class Clock:
        def __format__(self, _: str) -> str:
            return repr(clock())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postgres, "CLOCK", Clock())
        yield


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


@contextmanager
def running_pgbouncer(server: PostgresServer, url: str) -> Iterator[str]:
    """A PgBouncer in transaction mode with 3 connections; the URL of a database through it."""
    program = required_program("pgbouncer", "pgbouncer")
    user = _unprivileged()
    with tempfile.TemporaryDirectory(prefix="pgbouncer-") as name:
        directory, port, database = Path(name), free_port(), url.rpartition("/")[2]
        (directory / "users").write_text(f'"{_SUPERUSER}" "{PASSWORD}"\n')
        (directory / "ini").write_text(
            f"[databases]\n{database} = host=127.0.0.1 port={server.port}\n[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = plain\nauth_file = {directory / 'users'}\n"
            "pool_mode = transaction\ndefault_pool_size = 3\n"
        )
        for each in (directory, *directory.iterdir()):
            if user is not None:
                shutil.chown(each, user)
        with (
            (directory / "log").open("ab") as log,
            subprocess.Popen(
                [program, "-q", str(directory / "ini")], user=user, stdout=log, stderr=log
            ) as process,
        ):
            there = url.replace(f":{server.port}/", f":{port}/")

            def answers() -> bool:
                with suppress(psycopg.OperationalError), psycopg.connect(there):
                    return True
                return False

            try:
                eventually(answers)
                yield there
            finally:
                process.kill()

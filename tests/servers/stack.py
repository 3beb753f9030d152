"""The stack of docker/compose.yaml as plain processes: its files and commands, other addresses.

Only addresses, ports, the containers' paths and the half minute for which Alertmanager collects
are replaced, and each replacement has to hit. All other intervals, the rules, routes and limits are
those of the stack.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx

from langchain_quota.decision import THREAD
from langchain_quota.stores.keys import CountKey
from langchain_quota.stores.redis import RedisStore
from tests.compose import DOCKER, interpolated, mounted, replaced, services
from tests.forked import as_module, run_python
from tests.servers.otlp import Receiver, running_receiver
from tests.servers.postgres import running_postgres
from tests.servers.programs import required_program
from tests.servers.prometheus import Prometheus, eventually
from tests.servers.redis import RedisServer, running_redis

REPLICAS = "replicas"
"""Two processes on two ports, as the stack has them."""

WORKERS = "workers"
"""Two worker processes on one port, which share `PROMETHEUS_MULTIPROC_DIR`."""

SETTINGS = {
    "METRICS_TOKEN": "a-token-of-the-tests",
    "POSTGRES_PASSWORD": "a-password-of-the-tests",
    "LOAD_SECONDS": "6",
}
"""What would stand in docker/.env."""

PROMETHEUS_CONFIG = "/etc/prometheus/prometheus.yaml"
RULES = "/etc/prometheus/rules/langchain-quota-rules.yaml"
ALERTMANAGER_CONFIG = "/etc/alertmanager/alertmanager.yaml"
WEBHOOK = "/webhook/receiver.py"

STARTED = "Application startup complete."

_ADDRESS = r"(127\.0\.0\.1:\d+)"
_SERVING = re.compile(rf"Uvicorn running on http://{_ADDRESS}")
_LISTENING = re.compile(rf'msg="?Listening on"? address={_ADDRESS}')
_RECEIVING = re.compile(rf"listening on {_ADDRESS}")


class Program:
    """A process, with its output in a file.

    Args:
        name: Names the file.
        command: Starts it.
        directory: Where it runs, and the file is.
        environment: Beside this process's own.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        directory: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = directory / f"{name}.log"
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "PROM"))
        }
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=directory,
                env={**inherited, **(environment or {})},
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def says(self, pattern: re.Pattern[str]) -> str:
        """What a pattern's group is in its output, as soon as it is there."""

        def found() -> re.Match[str] | None:
            assert self.process.poll() is None, self.output
            return pattern.search(self.output)

        return eventually(found).group(1)


@dataclass(frozen=True)
class Alert:
    """An alert as the webhook logged it."""

    receiver: str
    status: str
    labels: Mapping[str, str]


class Stack:
    """A running stack.

    Args:
        shape: `REPLICAS` or `WORKERS`.
        directory: Where all files are.
        running: What is to be stopped at the end.
    """

    def __init__(self, shape: str, directory: Path, running: ExitStack) -> None:
        self.shape = shape
        self._directory = directory
        self._running = running
        self.redis: RedisServer = running.enter_context(
            running_redis(directory / "redis", *_redis())
        )
        database = running.enter_context(running_postgres()).database()
        self.otlp: Receiver = running.enter_context(running_receiver("grpc"))
        self._addresses = {
            "redis://redis:6379/0": self.redis.url,
            "postgresql://agent@postgres:5432/agent": database,
            "http://tempo:4317": self.otlp.url,
        }
        names = ["agent-1", "agent-2"] if shape == REPLICAS else ["agent-1"]
        self._agents = {name: self._start_agent(name, "0") for name in names}
        self._urls = {name: f"http://{each.says(_SERVING)}" for name, each in self._agents.items()}
        self._wait_for_starts(2)
        webhook = self._start("webhook", _webhook())
        self.webhook_url = f"http://{webhook.says(_RECEIVING)}"
        alertmanager = self._start("alertmanager", self._alertmanager())
        self.alertmanager_url = f"http://{alertmanager.says(_LISTENING)}"
        prometheus = self._start("prometheus", self._prometheus())
        self.prometheus = Prometheus(f"http://{prometheus.says(_LISTENING)}")
        running.callback(self.prometheus.close)
        eventually(lambda: self.prometheus.value("count(up == 1)") == len(names))

    @property
    def urls(self) -> list[str]:
        """Where the service answers."""
        return [*self._urls.values()]

    @contextmanager
    def served_by(self, index: int) -> Iterator[str]:
        """An address behind which only one replica or worker answers."""
        if self.shape == REPLICAS:
            yield self.urls[index]
            return
        others = [pid for at, pid in enumerate(self._worker_pids()) if at != index]
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield self._urls["agent-1"]
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)

    def kill(self, index: int) -> None:
        """Kill a replica or a worker, without a warning."""
        if self.shape == REPLICAS:
            process = [*self._agents.values()][index].process
            process.kill()
            process.wait()
        else:
            os.kill(self._worker_pids()[index], signal.SIGKILL)

    def wait_for_restart(self, index: int) -> None:
        """Wait until what was killed is there again: a replica we start, a worker uvicorn does."""
        if self.shape == REPLICAS:
            name = [*self._agents][index]
            port = self._urls[name].rpartition(":")[2]
            self._agents[name] = self._start_agent(name, port)
        self._wait_for_starts(3)
        for url in self.urls:
            eventually(partial(_ready, url))

    def load(self) -> str:
        """Let the load driver play; what it says at the end."""
        (first, *_), *rest = [[url] for url in self._urls.values()]
        second = rest[0][0] if rest else first
        command = interpolated(services()["load"]["entrypoint"], SETTINGS)
        addresses = {
            "python": sys.executable,
            "http://agent-1:8000": first,
            "http://agent-2:8000": second,
        }
        _, module_option, module, *arguments = _replaced(command, addresses)
        assert module_option == "-m"
        redis = {"LANGCHAIN_QUOTA_REDIS_URL": self.redis.url}
        environment = {**_python_environment(), **redis}
        done = run_python(as_module(module), *arguments, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def alerts(self) -> list[Alert]:
        """What has reached the webhook."""
        text = httpx.get(self.webhook_url, trust_env=False).text
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return [Alert(each["receiver"], each["status"], each["labels"]) for each in lines]

    def kept(self, thread_id: str | None = None) -> dict[tuple[str, str], int]:
        """What the shared store keeps of threads, by counter and thread."""
        with closing(RedisStore(self.redis.url)) as store:
            found = [(CountKey.parse(each.key), each.used) for each in store.usages()]
        return {
            (key.counter, key.subject): used
            for key, used in found
            if key.dimension == THREAD and thread_id in {None, key.subject}
        }

    def scraped(self) -> None:
        """Wait until all that has happened is in Prometheus."""
        # A worker writes down what the others are to know at most a second later.
        moment = time.time() + 2
        up = 'up{job="agents"}'
        fresh = f"count((timestamp({up}) > {moment}) and {up} == 1)"
        eventually(lambda: self.prometheus.value(fresh) == len(self._urls))

    def _wait_for_starts(self, count: int) -> None:
        """Wait until so many processes have started to serve, killed ones counted."""

        def started() -> bool:
            found = sum(each.output.count(STARTED) for each in self._agents.values())
            return found == count

        eventually(started)

    def _worker_pids(self) -> list[int]:
        supervisor = self._agents["agent-1"].process.pid
        command = [required_program("pgrep", "procps"), "-P", str(supervisor), "-f", "spawn_main"]

        def both() -> list[int]:
            found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            return [int(pid) for pid in found.split()] if len(found.split()) == 2 else []

        return eventually(both)

    def _start(self, name: str, command: Sequence[str], **options: Any) -> Program:
        program = Program(name, command, self._directory, **options)
        return self._running.enter_context(program)

    def _start_agent(self, name: str, port: str) -> Program:
        environment = interpolated(services()[name]["environment"], SETTINGS)
        lines = _replaced(
            [f"{key}={value}" for key, value in environment.items()],
            {**self._addresses, "HOST=0.0.0.0": "HOST=127.0.0.1"},
        )
        environment = {**_python_environment(), **dict(line.split("=", 1) for line in lines)}
        environment["PORT"] = port
        if self.shape == WORKERS:
            shared = self._directory / "multiproc"
            shared.mkdir(exist_ok=True)
            environment |= {"WORKERS": "2", "PROMETHEUS_MULTIPROC_DIR": str(shared)}
        return self._start(name, [sys.executable, *_image_command()[1:]], environment=environment)

    def _alertmanager(self) -> list[str]:
        config = self._directory / "alertmanager.yaml"
        routes = mounted("alertmanager", ALERTMANAGER_CONFIG).read_text()
        own = {"http://127.0.0.1:5001": self.webhook_url, "group_wait: 10s": "group_wait: 1s"}
        config.write_text(replaced(routes, own))
        command = interpolated(services()["alertmanager"]["command"], SETTINGS)
        paths = {
            ALERTMANAGER_CONFIG: str(config),
            "=/alertmanager": f"={self._directory / 'alertmanager'}",
        }
        return [
            required_program("prometheus-alertmanager", "prometheus-alertmanager"),
            *_replaced(command, paths),
            "--web.listen-address=127.0.0.1:0",
        ]

    def _prometheus(self) -> list[str]:
        token = self._directory / "metrics_token"
        token.write_text(SETTINGS["METRICS_TOKEN"])
        config = self._directory / "prometheus.yaml"
        addresses = {
            RULES: str(mounted("prometheus", RULES)),
            "/run/secrets/metrics_token": str(token),
            '"alertmanager:9093"': f'"{self.alertmanager_url.removeprefix("http://")}"',
            '"agent-1:8000", "agent-2:8000"': ", ".join(
                f'"{url.removeprefix("http://")}"' for url in self._urls.values()
            ),
        }
        text = mounted("prometheus", PROMETHEUS_CONFIG).read_text()
        config.write_text(replaced(text, addresses))
        command = interpolated(services()["prometheus"]["command"], SETTINGS)
        paths = {
            PROMETHEUS_CONFIG: str(config),
            "=/prometheus": f"={self._directory / 'prometheus'}",
        }
        return [
            required_program("prometheus", "prometheus"),
            *_replaced(command, paths),
            "--web.listen-address=127.0.0.1:0",
        ]


@contextmanager
def running_stack(shape: str, directory: Path) -> Iterator[Stack]:
    """Run the stack."""
    with ExitStack() as running:
        yield Stack(shape, directory, running)


def _redis() -> list[str]:
    command: list[str] = services()["redis"]["command"]
    assert command[0] == "redis-server"
    return command[1:]


def _webhook() -> list[str]:
    places = {
        "python": sys.executable,
        WEBHOOK: str(mounted("webhook", WEBHOOK)),
        "--addr=0.0.0.0": "--addr=127.0.0.1",
        "--port=5001": "--port=0",
    }
    return _replaced(services()["webhook"]["entrypoint"], places)


def _image_command() -> list[str]:
    """What the image runs."""
    lines = (DOCKER / "agent" / "Dockerfile").read_text().splitlines()
    (command,) = (line.removeprefix("CMD ") for line in lines if line.startswith("CMD "))
    found: list[str] = json.loads(command)
    assert found[0] == "python"
    return found


def _python_environment() -> dict[str, str]:
    return {"PYTHONPATH": str(DOCKER / "agent"), "PYTHONUNBUFFERED": "1"}


def _replaced(lines: Sequence[str], replacements: Mapping[str, str]) -> list[str]:
    return replaced("\n".join(lines), replacements).split("\n")


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", trust_env=False, timeout=5).is_success
    except httpx.HTTPError:
        return False

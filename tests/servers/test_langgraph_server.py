"""LangGraph's own server, as `langgraph dev` runs it, with agents that are held to limits.

The agents and what the server is told about them are in `tests/assets/langgraph_server`.
"""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from langchain.agents.middleware.human_in_the_loop import HITLRequest
from pydantic import TypeAdapter

from langchain_quota import RedisStore
from tests.servers.programs import missing
from tests.servers.prometheus import DEADLINE, Series, eventually, parse_openmetrics, series_of
from tests.servers.redis import RedisServer

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "tests" / "assets" / "langgraph_server"
VENV = ".venv-langgraph"
"""An environment of its own: the server needs older packages than the tests."""

REFUSED = "Tool call limit exceeded. Do not call 'search' again."

_ADDRESS = re.compile(r"API: \S*?(http://127\.0\.0\.1:\d+)")
_KEPT = ("HOME", "LANG", "PATH", "TMPDIR")


def langgraph() -> str:
    """The server's program; without it the test is skipped, and fails under `CI=true`."""
    path = os.pathsep.join([str(ROOT / VENV / "bin"), os.environ["PATH"]])
    program = shutil.which("langgraph", path=path)
    if program is None:
        missing("LangGraph's own server is not found: make langgraph-server")
    return program


class Server:
    """A running server, and whoever asks it.

    Args:
        process: The process.
        log: What it writes.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log
        self.url = eventually(self._ready)

    @property
    def log(self) -> str:
        """What it has written."""
        return self._log.read_text()

    def user(self, name: str) -> "User":
        """Somebody with a name."""
        return User(self.url, {"authorization": f"Bearer {name}"})

    def anybody(self) -> "User":
        """Somebody without one."""
        return User(self.url, {})

    def _ready(self) -> str | None:
        assert self._process.poll() is None, self.log
        found = _ADDRESS.search(self.log)
        if found is None:
            return None
        try:
            ready = httpx.get(f"{found[1]}/ok", timeout=DEADLINE, trust_env=False).is_success
        except httpx.TransportError:
            return None
        return found[1] if ready else None


class User:
    """A client of the server.

    Args:
        url: The server's address.
        headers: What every request carries.
    """

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._url = url
        self._headers = headers

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Ask for something."""
        with self._client(headers) as client:
            return client.get(path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Ask to do something."""
        with self._client({}) as client:
            response = client.post(path, json=body)
        assert response.is_success, response.text
        return response.json()

    def thread(self) -> str:
        """A new thread."""
        return str(self.post("/threads", {})["thread_id"])

    def start(self, graph: str, text: str, thread_id: str) -> None:
        """Run an agent in the background."""
        self.post(f"/threads/{thread_id}/runs", question(graph, text))

    def run(self, graph: str, text: str, thread_id: str | None = None, **options: object) -> Any:
        """Run an agent to its end, on a thread if one is given."""
        where = "" if thread_id is None else f"/threads/{thread_id}"
        return self.post(f"{where}/runs/wait", {**question(graph, text), **options})

    def resume(
        self, graph: str, thread_id: str, decision: dict[str, Any], **options: object
    ) -> Any:
        """Answer a question of a thread, as Agent Chat UI does."""
        body = {
            "assistant_id": graph,
            "input": {},
            "command": {"resume": {"decisions": [decision]}},
            **options,
        }
        return self.post(f"/threads/{thread_id}/runs/wait", body)

    def answers(
        self, graph: str, text: str, thread_id: str | None = None, **options: object
    ) -> list[str]:
        """What the tools answered to the newest question, in order of the alphabet."""
        found: list[str] = []
        for message in reversed(self.run(graph, text, thread_id, **options)["messages"]):
            if message["type"] == "human":
                break
            if message["type"] == "tool":
                found.append(message["content"])
        return sorted(found)

    def state(self, thread_id: str) -> Any:
        """The values of a thread's state."""
        return self.get(f"/threads/{thread_id}/state").json()["values"]

    def searches(self, thread_id: str) -> int:
        """How many searches a thread has used."""
        counts: dict[str, int] = self.state(thread_id).get("thread_tool_call_count") or {}
        return counts.get("search", 0)

    def series(self) -> Series:
        """Our metrics."""
        response = self.get("/quota/metrics", accept="application/openmetrics-text; version=1.0.0")
        assert response.status_code == 200, response.text
        return series_of(parse_openmetrics(response.text))

    def _client(self, headers: dict[str, str]) -> httpx.Client:
        return httpx.Client(
            base_url=self._url,
            headers={**self._headers, **headers},
            timeout=DEADLINE,
            trust_env=False,
        )


def question(graph: str, text: str) -> dict[str, Any]:
    """The body of a request that runs an agent."""
    return {
        "assistant_id": graph,
        "input": {"messages": [{"role": "user", "content": text}]},
    }


@contextmanager
def running_server(directory: Path, redis: RedisServer, **settings: str) -> Iterator[Server]:
    """Run the server on a free port; what it keeps is in the directory."""
    program = langgraph()
    shutil.copytree(ASSETS, directory / "app")
    environment = {
        **{name: os.environ[name] for name in _KEPT if name in os.environ},
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
        "LANGGRAPH_CLI_NO_ANALYTICS": "1",
        "LANGGRAPH_NO_VERSION_CHECK": "true",
        "LANGSMITH_TRACING": "false",
        "LANGCHAIN_QUOTA_REDIS_URL": redis.url,
        **settings,
    }
    with socket.socket() as probe:  # if another takes it meanwhile, the server takes another one
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = directory / "log"
    options = ("--no-browser", "--no-reload", "--n-jobs-per-worker", "8")
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [program, "dev", *options, "--host", "127.0.0.1", "--port", str(port)],
            cwd=directory / "app",
            env=environment,
            stdout=output,
            stderr=output,
        ) as process,
    ):
        try:
            yield Server(process, log)
        finally:
            process.kill()


@pytest.fixture(
    scope="module", params=["false", "true"], ids=["one loop for all runs", "a loop for each run"]
)
def server(
    request: pytest.FixtureRequest,
    redis_server: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """The server in both ways to run agents: on one event loop, or each on a loop of its own."""
    directory = tmp_path_factory.mktemp("langgraph")
    with running_server(directory, redis_server, BG_JOB_ISOLATED_LOOPS=request.param) as running:
        yield running


@pytest.fixture
def user(server: Server) -> User:
    """Somebody who never asked before."""
    return server.user(f"user-{uuid4().hex}")


def test_counts_go_on_with_the_thread(user: User) -> None:
    """The checkpointer that the server brings keeps a thread's counts from run to run."""
    thread = user.thread()
    assert user.answers("by_thread", "search search", thread) == ["found"] * 2
    assert user.answers("by_thread", "search search", thread) == [REFUSED, "found"]

    assert user.searches(thread) == 3
    assert user.state(thread)["thread_model_call_count"] == 4
    assert user.answers("by_thread", "search", user.thread()) == ["found"]


def test_metrics_of_a_thread(server: Server, user: User) -> None:
    """A route beside the server's own has a thread's series, for whom the server knows only."""
    thread = user.thread()
    user.run("by_thread", "search search search search", thread)

    series = user.series()
    labels = frozenset({"agent": "by_thread", "limit": "tool:search", "thread_id": thread}.items())
    assert series["langchain_quota_thread_used", labels] == 3
    assert series["langchain_quota_thread_limit", labels] == 3
    assert series["langchain_quota_thread_blocked_total", labels] == 1

    assert server.anybody().get("/quota/metrics").status_code == 401
    own = server.anybody().get("/metrics")
    assert own.status_code == 200
    assert "langchain_quota" not in own.text


def test_nothing_blocks_the_loop(user: User) -> None:
    """The server's detector of blocking calls is on, and finds none of ours."""
    assert user.run("by_thread", "block", user.thread())["__error__"]["error"] == "BlockingError"

    for graph in ("by_thread", "by_user"):
        assert "__error__" not in user.run(graph, "search search search search", user.thread())
    assert not [name for name, _ in user.series() if name == "langchain_quota_errors_total"]


def test_runs_at_once_on_a_thread(user: User) -> None:
    """The server runs a thread's runs one after the other, so that the state's count holds."""
    thread = user.thread()
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda _: user.answers("by_thread", "search search", thread), range(4))
        assert sum(each.count("found") for each in answers) == 3
    assert user.searches(thread) == 3


@pytest.mark.parametrize(("strategy", "searches"), [("interrupt", 3), ("rollback", 2)])
def test_a_run_that_stops_another(user: User, strategy: str, searches: int) -> None:
    """What a stopped run had begun stays charged; a rollback takes it back with the run."""
    thread = user.thread()
    user.run("by_thread", "search", thread)
    user.start("by_thread", "search wait", thread)
    eventually(lambda: user.searches(thread) == 2)
    answers = user.answers("by_thread", "search", thread, multitask_strategy=strategy)
    assert answers == ["found"]
    assert user.searches(thread) == searches


def test_other_ways_to_a_thread(user: User) -> None:
    """A copy has the thread's counts, an old checkpoint its own; input cannot set them."""
    thread = user.thread()
    user.run("by_thread", "search search", thread)
    body = question("by_thread", "search")
    body["input"]["thread_tool_call_count"] = {"search": 0}
    user.post(f"/threads/{thread}/runs/wait", body)
    assert user.searches(thread) == 3

    copied = user.post(f"/threads/{thread}/copy", {})["thread_id"]
    assert user.answers("by_thread", "search", copied) == [REFUSED]

    oldest = user.post(f"/threads/{thread}/history", {"limit": 100})[-1]["checkpoint"]
    user.run("by_thread", "search", thread, checkpoint_id=oldest["checkpoint_id"])
    assert user.searches(thread) == 1


def test_runs_without_a_thread(server: Server, user: User) -> None:
    """Without a thread the server brings no checkpointer: each run has the whole limit."""
    for _ in range(2):
        answers = user.answers("by_thread", "search search search search")
        assert answers == [REFUSED, *["found"] * 3]
    assert "QuotaWarning" in server.log


def test_whoever_may_update_the_state_may_reset_a_thread(user: User) -> None:
    """The server's API sets a thread's counts back, where no store has them."""
    thread = user.thread()
    assert user.answers("by_thread", "search search search", thread) == ["found"] * 3
    counts = {"thread_tool_call_count": {}, "thread_model_call_count": 0}
    user.post(f"/threads/{thread}/state", {"values": counts})
    assert user.answers("by_thread", "search", thread) == ["found"]


def test_users_have_quotas(server: Server, user: User) -> None:
    """A quota per user of the server holds over threads and runs at once, in Redis."""
    threads = [user.thread() for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda each: user.answers("by_user", "search", each), threads))
    assert sorted(answers) == [[REFUSED]] * 3 + [["found"]] * 3

    other = server.user(f"user-{uuid4().hex}")
    assert other.answers("by_user", "search", other.thread()) == ["found"]


def test_a_person_is_asked(server: Server, user: User, redis_server: RedisServer) -> None:
    """A thread waits as interfaces show it, and who answers over HTTP is known to have granted."""
    thread = user.thread()
    waits = user.run("asking", "search search", thread)
    found = user.get(f"/threads/{thread}").json()
    assert found["status"] == "interrupted"
    ((interrupt,),) = found["interrupts"].values()
    assert waits["__interrupt__"][0]["value"] == interrupt["value"]
    request = TypeAdapter(HITLRequest).validate_python(interrupt["value"])
    (action,), (config,) = request["action_requests"], request["review_configs"]
    assert action["args"] == {"tool:search": 2}
    assert config["action_name"] == action["name"]

    # Who answers is who the server says, not who the request says.
    name = f"user-{uuid4().hex}"
    decision = {"type": "approve", "amount": 1, "by": "somebody"}
    claimed = {"configurable": {"langgraph_auth_user_id": "somebody"}}
    approver = server.user(name)
    messages = approver.resume("asking", thread, decision, config=claimed)["messages"]
    assert [each["content"] for each in messages if each["type"] == "tool"] == ["found"] * 2
    assert user.get(f"/threads/{thread}").json()["status"] == "idle"
    with closing(RedisStore(redis_server.url, prefix="asking")) as store:
        (grant,) = store.grants(f"search:thread:{thread}")
    assert (grant.amount, grant.by) == (1, name)

"""LangGraph's own server, as `langgraph dev` runs it, with agents that are held to limits.

The agents and what the server is told about them are in `tests/assets/langgraph_server`.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from langchain.agents.middleware.human_in_the_loop import HITLRequest
from pydantic import TypeAdapter

from langchain_quota import RedisStore
from tests.server.programs import missing
from tests.server.prometheus import DEADLINE, Series, eventually, parse_openmetrics, series_of
from tests.server.redis import RedisServer, free_port

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "tests" / "assets" / "langgraph_server"
PAGE = ROOT / "docs" / "production.md"
VENV = ".venv-langgraph"
"""An environment of its own: the server needs older packages than the tests."""

REFUSED = "Tool call limit exceeded. Do not call 'search' again."

_ADDRESS = re.compile(r"API: \S*?(http://127\.0\.0\.1:\d+)")
_KEPT = ("HOME", "LANG", "PATH", "TMPDIR")
_SETTINGS = {
    "PYTHONUNBUFFERED": "1",
    "NO_COLOR": "1",
    "LANGGRAPH_CLI_NO_ANALYTICS": "1",
    "LANGGRAPH_NO_VERSION_CHECK": "true",
    "LANGSMITH_TRACING": "false",
}


class User:
    """A client of the server: somebody with a name, or without one."""

    def __init__(self, url: str, name: str = "") -> None:
        self.url = url
        self._headers = {"authorization": f"Bearer {name}"} if name else {}

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Ask for something."""
        return self._request("GET", path, headers=headers)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Ask to do something."""
        response = self._request("POST", path, json=body)
        assert response.is_success, response.text
        return response.json()

    def status(self, path: str, body: dict[str, Any]) -> int:
        """How the server answers what one asks it to do."""
        return self._request("POST", path, json=body).status_code

    def _request(self, method: str, path: str, **given: Any) -> httpx.Response:
        headers = {**self._headers, **given.pop("headers", {})}
        given |= {"headers": headers, "timeout": DEADLINE, "trust_env": False}
        return httpx.request(method, self.url + path, **given)

    def thread(self) -> str:
        """A new thread."""
        return str(self.post("/threads", {})["thread_id"])

    def run(self, graph: str, text: str, thread_id: str, **options: object) -> Any:
        """Run an agent to its end, on a thread."""
        return self.post(f"/threads/{thread_id}/runs/wait", {**question(graph, text), **options})

    def answers(self, graph: str, text: str, thread_id: str, **options: object) -> list[str]:
        """What the tools answered to the newest question, in order of the alphabet."""
        messages = self.run(graph, text, thread_id, **options)["messages"]
        newest = takewhile(lambda each: each["type"] != "human", reversed(messages))
        return sorted(each["content"] for each in newest if each["type"] == "tool")

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


def question(graph: str, text: str) -> dict[str, Any]:
    """The body of a request that runs an agent."""
    return {"assistant_id": graph, "input": {"messages": [{"role": "user", "content": text}]}}


@pytest.fixture(
    scope="module", params=["false", "true"], ids=["one loop for all runs", "a loop for each run"]
)
def server(
    request: pytest.FixtureRequest,
    redis_server: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[User]:
    """The server in both ways to run agents, on a free port, and whoever asks it."""
    path = os.pathsep.join([str(ROOT / VENV / "bin"), os.environ["PATH"]])
    program = shutil.which("langgraph", path=path)
    if program is None:
        missing("LangGraph's own server is not found: make langgraph-server")
    directory = tmp_path_factory.mktemp("langgraph")
    shutil.copytree(ASSETS, directory / "app")
    (rules,) = re.findall(r"```python\n(# auth\.py.*?)```", PAGE.read_text(), re.DOTALL)
    with (directory / "app" / "auth.py").open("a") as code:
        code.write(rules.replace("auth = Auth()\n", ""))
    environment = {
        **{name: os.environ[name] for name in _KEPT if name in os.environ},
        **_SETTINGS,
        "LANGCHAIN_QUOTA_REDIS_URL": redis_server.url,
        "BG_JOB_ISOLATED_LOOPS": request.param,
    }
    log = directory / "log"
    # If another takes the port meanwhile, the server takes another one.
    options = ("--no-browser", "--no-reload", "--n-jobs-per-worker", "8", "--host", "127.0.0.1")
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [program, "dev", *options, "--port", str(free_port())],
            cwd=directory / "app",
            env=environment,
            stdout=output,
            stderr=output,
        ) as process,
    ):

        def ready() -> str | None:
            assert process.poll() is None, log.read_text()
            found = _ADDRESS.search(log.read_text())
            with suppress(httpx.TransportError):
                if found is not None and User(found[1]).get("/ok").is_success:
                    return found[1]
            return None

        try:
            yield User(eventually(ready))
        finally:
            process.kill()


@pytest.fixture
def user(server: User) -> User:
    """Somebody who never asked before."""
    return User(server.url, f"user-{uuid4().hex}")


def test_metrics_of_a_thread(server: User, user: User) -> None:
    """A route beside the server's own has a thread's series, for whom the server knows only."""
    thread = user.thread()
    user.run("by_thread", "search search search search", thread)

    series = user.series()
    labels = frozenset({"agent": "by_thread", "limit": "tool:search", "thread_id": thread}.items())
    assert series["langchain_quota_thread_used", labels] == 3
    assert series["langchain_quota_thread_limit", labels] == 3
    labels |= {("scope", "thread")}
    assert series["langchain_quota_thread_blocked_total", labels] == 1

    assert server.get("/quota/metrics").status_code == 401
    own = server.get("/metrics")
    assert own.status_code == 200
    assert "langchain_quota" not in own.text


def test_nothing_blocks_the_loop(user: User) -> None:
    """The server's detector of blocking calls is on, and finds none of ours."""
    assert user.run("by_thread", "block", user.thread())["__error__"]["error"] == "BlockingError"

    for graph in ("by_thread", "by_user"):
        assert "__error__" not in user.run(graph, "search search search search", user.thread())
    assert not [name for name, _ in user.series() if name == "langchain_quota_errors_total"]


@pytest.mark.parametrize(("strategy", "searches"), [("interrupt", 3), ("rollback", 2)])
def test_a_run_that_stops_another(user: User, strategy: str, searches: int) -> None:
    """What a stopped run had begun stays charged; a rollback takes it back with the run."""
    thread = user.thread()
    user.run("by_thread", "search", thread)
    user.post(f"/threads/{thread}/runs", question("by_thread", "search wait"))
    eventually(lambda: user.searches(thread) == 2)
    answers = user.answers("by_thread", "search", thread, multitask_strategy=strategy)
    assert answers == ["found"]
    assert user.searches(thread) == searches


TRUSTED_ONLY: dict[str, Any] = {
    "update": {"command": {"update": {"messages": []}}},
    "goto": {"command": {"goto": "tools"}},
    "checkpoint_id": {"checkpoint_id": "of", "input": None},
    "checkpoint": {"checkpoint": {"checkpoint_id": "of"}, "input": None},
    "config": {"config": {"configurable": {"checkpoint_id": "of"}}, "input": None},
}
"""What the page's rules refuse, by parameter; `of` stands for the id of the oldest checkpoint."""


@pytest.mark.parametrize("route", ["runs", "runs/wait", "runs/stream"])
@pytest.mark.parametrize("sent", TRUSTED_ONLY)
def test_what_only_trusted_callers_may_send(server: User, sent: str, route: str) -> None:
    """The page's rules refuse what moves a thread, and take input and answers from everybody."""
    guest = User(server.url, f"guest-{uuid4().hex}")
    thread = guest.thread()
    guest.run("by_thread", "search", thread)
    oldest = guest.post(f"/threads/{thread}/history", {"limit": 100})[-1]["checkpoint"]
    body = json.dumps({**question("by_thread", "search"), **TRUSTED_ONLY[sent]})
    body = body.replace('"of"', f'"{oldest["checkpoint_id"]}"')
    assert guest.status(f"/threads/{thread}/{route}", json.loads(body)) == 403
    values: Any = {"values": {"thread_tool_call_count": {}}}
    assert guest.status(f"/threads/{thread}/state", values) == 403
    assert guest.searches(thread) == 1
    guest.run("asking", "search search", thread := guest.thread())
    answer: Any = {"resume": {"decisions": [{"type": "approve"}]}}
    messages = guest.run("asking", "", thread, input=None, command=answer)["messages"]
    assert [each["content"] for each in messages if each["type"] == "tool"] == ["found"] * 2


@pytest.mark.parametrize("how", ["replayed", "answered"])
def test_what_runs_again_on_a_server(how: str, user: User) -> None:
    """Runs that go on at an old checkpoint, with the server's checkpointer, are charged again."""
    thread = user.thread()
    user.run("by_user", "search", thread)
    history = user.post(f"/threads/{thread}/history", {"limit": 100})
    (at,) = [each["checkpoint"]["checkpoint_id"] for each in history if each["next"] == ["tools"]]
    command: Any = {"command": {"resume": "yes"}} if how == "answered" else {}
    answers = [
        user.answers("by_user", "", thread, input=None, checkpoint_id=at, **command)
        for _ in range(4)
    ]
    assert answers == [["found"]] * 2 + [[REFUSED]] * 2


def test_users_have_quotas(server: User, user: User) -> None:
    """A quota per user of the server holds over threads and runs at once, in Redis."""
    threads = [user.thread() for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda each: user.answers("by_user", "search", each), threads))
    assert sorted(answers) == [[REFUSED]] * 3 + [["found"]] * 3

    other = User(server.url, f"user-{uuid4().hex}")
    assert other.answers("by_user", "search", other.thread()) == ["found"]


def test_users_see_their_limits(server: User, user: User) -> None:
    """All of the server's routes have a user's RateLimit headers, and one the user's limits."""
    thread = user.thread()
    user.answers("by_user", "search", thread)
    (limit,) = user.get("/quota/me").json()["limits"]
    assert (limit["policy"], limit["left"]) == ("tool:search/user", 2)
    # What was read for the answer that began before the call may be a second old.
    left = '"tool:search/user";r=2'
    eventually(lambda: user.get(f"/threads/{thread}").headers["ratelimit"] == left)
    assert server.get("/quota/me").status_code == 401
    assert "ratelimit" not in server.get("/ok").headers


def test_a_person_is_asked(server: User, user: User, redis_server: RedisServer) -> None:
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
    body: Any = {"assistant_id": "asking", "input": {}, "config": claimed}
    body["command"] = {"resume": {"decisions": [decision]}}
    messages = User(server.url, name).post(f"/threads/{thread}/runs/wait", body)["messages"]
    assert [each["content"] for each in messages if each["type"] == "tool"] == ["found"] * 2
    assert user.get(f"/threads/{thread}").json()["status"] == "idle"
    with closing(RedisStore(redis_server.url, prefix="asking")) as store:
        (grant,) = store.grants(f"search:thread:{thread}")
    assert (grant.amount, grant.by) == (1, name)

"""RateLimit headers of real servers: FastAPI and streams under uvicorn, and a browser's `fetch`."""

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from http_sf import parse
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from langchain_quota import MemoryStore, ModelCallLimit, Quota, QuotaHeadersMiddleware
from tests.clock import Clock
from tests.scene import Scene
from tests.server.browser import HAS_PLAYWRIGHT
from tests.server.programs import missing, required_program
from tests.server.prometheus import eventually
from tests.telemetry import Signals

fastapi = pytest.importorskip("fastapi")
pytestmark = pytest.mark.rest

LIMIT = ModelCallLimit(quotas=[Quota(2, per="user_id", window="1d")])


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address at which uvicorn serves an app."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def user_of(scope: Any) -> dict[str, str] | None:
    user = scope.get("state", {}).get("user")
    return {"user_id": user} if user else None


async def authenticate(request: Request, call_next: Any) -> Any:
    """Trust a header, where a real app has a token."""
    request.state.user = request.headers.get("x-user", "")
    return await call_next(request)


def chat_app(signals: Signals, kind: type[Any]) -> Any:
    """An app that runs an agent for its users, and answers in one piece or by a stream."""
    options: Any = {"store": MemoryStore(clock=Clock()), "thread_id": None, "checkpointer": None}
    scene = Scene(signals, lambda _: "done", [LIMIT], **options)
    asked: Any = {"messages": [("user", "hi")]}

    async def chat(request: Request) -> JSONResponse:
        result = await scene.agent.ainvoke(asked, context={"user_id": request.state.user})
        return JSONResponse({"text": result["messages"][-1].text})

    async def stream(request: Request) -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            context = {"user_id": request.state.user}
            async for update in scene.agent.astream(asked, context=context, stream_mode="updates"):
                yield f"data: {[*update]}\n\n"
            yield f"data: {scene.quota.left('model', **context).left}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    app = kind()
    app.add_route("/chat", chat)
    app.add_route("/stream", stream)
    app.add_middleware(QuotaHeadersMiddleware, quota=scene.quota, subject=user_of)
    app.add_middleware(BaseHTTPMiddleware, dispatch=authenticate)
    names = ["RateLimit", "RateLimit-Policy", "Retry-After"]
    cors: Any = {"allow_origins": ["*"], "allow_headers": ["x-user"], "expose_headers": names}
    app.add_middleware(CORSMiddleware, **cors)
    return app


@pytest.mark.parametrize("kind", [Starlette, fastapi.FastAPI], ids=lambda kind: kind.__name__)
def test_under_uvicorn(signals: Signals, kind: Any) -> None:
    """Users see their own; a stream's headers say what was left before its run, which begins."""
    with serving(chat_app(signals, kind)) as url, httpx.Client(trust_env=False) as client:

        def get(path: str, user: str) -> tuple[int, int]:
            response = client.get(f"{url}/{path}", headers={"x-user": user})
            items: Any = parse(response.headers["ratelimit"].encode(), tltype="list")
            return response.status_code, dict(items)["model/user_id"]["r"]

        # Within a second, the headers may still be those of the first run.
        assert [get("chat", "ada") for _ in range(3)][::2] == [(200, 1), (429, 0)]
        assert get("chat", "bob") == (200, 1)
        assert client.get(f"{url}/quota/me").status_code == 401
        for used in range(3):
            expected = 404, 2 - used
            eventually(lambda: get("none", "eve") == expected)  # noqa: B023 - called at once
            user = {"x-user": "eve"}
            with client.stream("GET", f"{url}/stream", headers=user) as response:
                left = response.headers["ratelimit"]
                assert (response.status_code, left) == (
                    200,
                    f'"model/user_id";r={2 - used};t=85400',
                )
                assert [*filter(None, response.iter_lines())][-1] == f"data: {max(0, 1 - used)}"


FETCH = """async (url) => {
  const answers = [];
  for (let n = 0; n < 3; n++) {
    const response = await fetch(url, { headers: { "x-user": "ada" } });
    const names = ["RateLimit-Policy", "Retry-After"];
    answers.push([response.status, ...names.map((name) => response.headers.get(name))]);
  }
  return answers;
}"""


def test_fetch_in_a_browser(signals: Signals) -> None:
    """A page of another origin reads the headers, those of a 429 too, as the app exposes them."""
    chromium = required_program("chromium", "chromium")
    if not HAS_PLAYWRIGHT:
        missing("playwright not found: pip install playwright")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - may be missing

    with (
        serving(chat_app(signals, Starlette)) as url,
        serving(Starlette()) as elsewhere,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(elsewhere)
        answers = page.evaluate(FETCH, f"{url}/chat")
        browser.close()
    policy = '"model/user_id";q=2;qu="calls";w=86400'
    assert [answer[:2] for answer in answers] == [[200, policy], [200, policy], [429, policy]]
    assert [answer[2] for answer in answers] == [None, None, "85400"]

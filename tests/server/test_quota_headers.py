"""RateLimit headers of real servers: FastAPI, streams and other origins, under uvicorn."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from http_sf import parse
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from langchain_quota import MemoryStore, ModelCallLimit, Quota, QuotaHeadersMiddleware
from tests.scene import Scene
from tests.server.browser import serving
from tests.server.prometheus import eventually
from tests.stores import Clock
from tests.telemetry import Signals

fastapi = pytest.importorskip("fastapi")
NAMES = ["RateLimit", "RateLimit-Policy", "Retry-After"]
LIMIT = ModelCallLimit(quotas=[Quota(2, per="user_id", window="1d")])


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
    app.add_middleware(CORSMiddleware, allow_origins=["*"], expose_headers=NAMES)
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
                    f'"model/user_id";r={2 - used};t=43200',
                )
                assert [*filter(None, response.iter_lines())][-1] == f"data: {max(0, 1 - used)}"


def test_a_page_of_another_origin(signals: Signals) -> None:
    """Browsers let it read the headers that the app exposes, those of a 429 too."""
    who = {"x-user": "ada", "origin": "https://elsewhere.example.org"}
    with serving(chat_app(signals, Starlette)) as url, httpx.Client(trust_env=False) as client:
        answers = [client.get(f"{url}/chat", headers=who) for _ in range(3)]
    assert [each.status_code for each in answers] == [200, 200, 429]
    assert answers[2].headers["retry-after"] == "43200"
    for each in answers:
        assert each.headers["access-control-expose-headers"] == ", ".join(NAMES)
        assert each.headers["ratelimit-policy"] == '"model/user_id";q=2;qu="calls";w=86400'

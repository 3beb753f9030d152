"""The HTTP API."""

import asyncio
import hmac
from base64 import b64encode
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException, Path, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from psycopg import OperationalError
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from langchain_quota import (
    MemoryStore,
    QuotaHeadersMiddleware,
    RedisStore,
    StopReason,
    metrics_app,
    quota_app,
    stop_reason,
    usage,
)
from service.agent import Caller, build_agent, build_quota
from service.settings import Settings
from service.threads import open_threads

settings = Settings()  # type: ignore[call-arg]  # from the environment
redis_url = settings.langchain_quota_redis_url
store = RedisStore(str(redis_url)) if redis_url else MemoryStore()
quota = build_quota(settings, store)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open the threads, and close all connections at the end."""
    async with open_threads(settings.database_url) as checkpointer:
        app.state.agent = build_agent(settings, quota, checkpointer)
        yield
    if isinstance(store, RedisStore):
        await store.aclose()


app = FastAPI(
    lifespan=lifespan,
    max_body_size=64 * 1024,
    # FastAPI's span is the parent of the agent's; it sends both where OTEL_… says.
    telemetry={
        "auto_configure": True,
        "operation_spans": False,
        "metrics": False,
        "logs": False,
        "exclude": lambda scope: not scope["path"].startswith("/threads/"),
    },
)


# The user, as the proxy in front of the service has authenticated them.
User = Annotated[str, Header(alias="x-forwarded-user", min_length=1, max_length=128)]
ThreadId = Annotated[str, Path(pattern=r"^[\w.@-]{1,128}$")]


def subject(scope: Any) -> dict[str, str] | None:
    """Return whose limits the RateLimit headers and `/quota/me` show."""
    user = Headers(scope=scope).get("x-forwarded-user")
    return {"user_id": user} if user else None


app.add_middleware(QuotaHeadersMiddleware, quota=quota, subject=subject)


@app.exception_handler(OperationalError)
async def refuse(_: Request, error: OperationalError) -> JSONResponse:
    """Answer that the threads cannot be read or written now."""
    return JSONResponse({"detail": type(error).__name__}, 503, {"Retry-After": "5"})


class Question(BaseModel):
    """A message to the agent."""

    text: str = Field(min_length=1, max_length=8_000)


class Answer(BaseModel):
    """The answer, why calls were blocked before, and why a limit ended the run, if one did."""

    text: str
    refusals: list[StopReason]
    stopped: StopReason | None

    @classmethod
    def of(cls, messages: Sequence[BaseMessage]) -> "Answer":
        """Return what follows the last question of a thread."""
        asked = max(at for at, each in enumerate(messages) if isinstance(each, HumanMessage))
        tools = [each for each in messages[asked:] if isinstance(each, ToolMessage)]
        refusals = [reason for each in tools if (reason := stop_reason(each))]
        return cls(text=messages[-1].text, refusals=refusals, stopped=stop_reason([*messages]))


def _run(thread_id: str, user: str, question: Question) -> dict[str, Any]:
    """Return the arguments of a run."""
    return {
        "input": {"messages": [HumanMessage(question.text)]},
        "config": {"configurable": {"thread_id": thread_id}},
        "context": Caller(user),
    }


@app.post("/threads/{thread_id}/messages")
async def ask(thread_id: ThreadId, user: User, question: Question, request: Request) -> Answer:
    """Ask the agent, and wait for its answer.

    If a limit ended the run, QuotaHeadersMiddleware sends 429 in place of the answer, except where
    waiting does not help (403), and where the limit could not be checked (503).
    """
    run = app.state.agent.ainvoke(**_run(thread_id, user, question))
    answer = Answer.of((await _unless_gone(request, run))["messages"])
    if answer.stopped and answer.stopped["scope"] == "store":
        raise HTTPException(503, answer.stopped, {"Retry-After": "5"})
    if answer.stopped and answer.stopped["resets_at"] is None:
        raise HTTPException(403, answer.stopped)
    return answer


@app.post("/threads/{thread_id}/messages/stream", response_class=EventSourceResponse)
async def stream(
    thread_id: ThreadId, user: User, question: Question
) -> AsyncIterator[ServerSentEvent]:
    """Ask the agent, and stream its tokens, what tools answer, and the end."""
    run = _run(thread_id, user, question)
    events = asyncio.Queue[ServerSentEvent | None]()

    async def play() -> None:
        state: Any = None
        async for mode, part in app.state.agent.astream(**run, stream_mode=["messages", "values"]):
            if mode == "values":
                state = part
            elif isinstance(part[0], ToolMessage):
                result = {
                    "name": part[0].name,
                    "text": part[0].text,
                    "refusal": stop_reason(part[0]),
                }
                events.put_nowait(ServerSentEvent(event="tool", data=result))
            elif isinstance(part[0], AIMessageChunk) and part[0].text:
                events.put_nowait(ServerSentEvent(event="token", data=part[0].text))
        events.put_nowait(ServerSentEvent(event="final", data=Answer.of(state["messages"])))

    # Of a client that hangs up, Starlette cancels every await of this task, again and again. A task
    # of its own, which is cancelled once, can end what it has begun, and release its slots.
    playing = asyncio.create_task(play())
    playing.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while event := await events.get():
            yield event
        await playing  # raises what it has raised
    finally:
        playing.cancel()


async def _unless_gone(request: Request, run: Coroutine[Any, Any, Any]) -> Any:
    """Await a run, and cancel it when the client hangs up, as FastAPI does for streams only."""
    running = asyncio.create_task(run)
    # The body has been read, so the next message is that the client is gone.
    gone = asyncio.ensure_future(request.receive())
    gone.add_done_callback(lambda _: running.cancel())
    try:
        return await running
    except asyncio.CancelledError:
        if gone.done():
            raise HTTPException(499) from None  # for the access log: nobody gets it
        raise
    finally:
        gone.cancel()


@app.get("/threads/{thread_id}/usage")
async def thread_usage(thread_id: ThreadId) -> dict[str, dict[str, Any]]:
    """Return what a thread and its newest run have used."""
    config = {"configurable": {"thread_id": thread_id}}
    snapshot = await app.state.agent.aget_state(config)
    if not snapshot.values:
        raise HTTPException(404, "there is no such thread")
    used = usage(snapshot)
    return {
        "thread": {"model": used.model, "tools": {**used.tools}, "spent": {**used.spent}},
        "run": {"model": used.run_model, "tools": {**used.run_tools}, "spent": {**used.run_spent}},
    }


@app.get("/healthz")
async def alive() -> None:
    """Answer, if the process does."""


@app.get("/readyz")
async def ready() -> None:
    """Answer if the databases do, too."""
    config = {"configurable": {"thread_id": "readyz"}}
    try:
        async with asyncio.timeout(2):
            await app.state.agent.aget_state(config)
            await store.apeek(["readyz"])
    except Exception as error:  # each database raises its own
        raise HTTPException(503, type(error).__name__) from error


class Guarded:
    """An app, for clients that send the token, or this user and the token as the password."""

    def __init__(self, app: ASGIApp, user: str = "quota") -> None:
        self._app = app
        basic = b64encode(f"{user}:{settings.metrics_token}".encode()).decode()
        self._allowed = [f"Bearer {settings.metrics_token}".encode(), f"Basic {basic}".encode()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        shown = dict(scope["headers"]).get(b"authorization", b"")
        allowed = any(hmac.compare_digest(shown, each) for each in self._allowed)
        denied = PlainTextResponse("", 401, {"WWW-Authenticate": "Basic"})
        await (self._app if allowed else denied)(scope, receive, send)


# A route: a mount would answer with a redirect.
app.router.routes.append(Route("/metrics", Guarded(metrics_app())))
# A browser cannot send a bearer token, so it asks for a password.
app.mount("/quota", Guarded(quota_app(dashboards_url=settings.dashboards_url)))

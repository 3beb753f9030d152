"""The HTTP API."""

import asyncio
import hmac
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from langchain_quota import CostLimit, metrics_app, quota_app, usage
from service.agent import build_agent, limits
from service.bodies import BoundedBodies
from service.runs import BusyError, Run, Runs, Token, ToolCalls, ToolResult, observe
from service.settings import Settings
from service.shapes import (
    NANODOLLARS,
    Answer,
    Counts,
    Failed,
    Id,
    Limited,
    Problem,
    Question,
    Refusal,
    Refused,
    Shape,
    Usage,
    unit_of,
)
from service.storage import open_quotas, open_threads, reachable
from service.telemetry import REQUEST_SPANS, tracing

CLIENT_CLOSED_REQUEST = 499
"""Only the access log shows this status: the client is gone."""

TOKENS = "model.total_tokens"
"""The name under which the state keeps the total of tokens."""

_EVENTS: dict[type[Shape], str] = {
    Token: "token",
    ToolCalls: "tool_calls",
    ToolResult: "tool_result",
    Refusal: "refusal",
    Answer: "final",
    Refused: "error",
    Failed: "error",
}

_KNOWN = {"body", "path", "thread_id", *Question.model_fields}

_PROBLEMS = {
    400: (422, "invalid_request"),  # FastAPI's for a body that cannot be decoded
    404: (404, "not_found"),
    405: (405, "method_not_allowed"),
    409: (409, "thread_busy"),
}

T = TypeVar("T")


def from_environment() -> FastAPI:
    """The app, as a server's worker makes it."""
    return create_app(Settings.from_environment())


def create_app(settings: Settings) -> FastAPI:
    """The app.

    Args:
        settings: The settings.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(tracing())
            threads = await stack.enter_async_context(open_threads(settings.database_url))
            store = await stack.enter_async_context(open_quotas(settings.redis_url))
            app.state.agent = build_agent(
                settings, checkpointer=threads.saver, store=store, on_decision=observe
            )
            app.state.runs = Runs(app.state.agent)
            app.state.limits = limits(settings)
            app.state.checks = {
                "threads": threads.check,
                "quotas": lambda: store.apeek(["readyz"]),
            }
            yield

    app = FastAPI(
        title="Agent held to limits",
        lifespan=lifespan,
        telemetry=REQUEST_SPANS,
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(BoundedBodies)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_problem)
    app.add_exception_handler(Exception, _internal_error)
    app.add_api_route(
        "/threads/{thread_id}/messages", _post, methods=["POST"], responses=_RESPONSES
    )
    app.add_api_route(
        "/threads/{thread_id}/messages/stream", _stream, methods=["POST"], responses=_RESPONSES
    )
    app.add_api_route("/threads/{thread_id}/usage", _usage, methods=["GET"], response_model=Usage)
    app.add_api_route("/healthz", _alive, methods=["GET"])
    app.add_api_route("/readyz", _ready, methods=["GET"])
    # A route: a mount would answer with a redirect.
    guard = partial(_Guarded, token=settings.metrics_token)
    app.router.routes.append(Route("/metrics", guard(metrics_app())))
    # A browser cannot send a bearer token, so it asks for a password: any user, and the token.
    page = quota_app(dashboards_url=settings.dashboards_url or None)
    app.mount("/quota", guard(page, scheme="basic"))
    return app


_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"model": Answer},
    403: {"model": Refused, "description": "A limit ended the run; waiting does not help."},
    429: {"model": Refused, "description": "A limit ended the run; see Retry-After."},
    503: {"model": Refused, "description": "A limit could not be checked; see Retry-After."},
    409: {"model": Failed, "description": "The thread is busy."},
    422: {"model": Failed, "description": "The request is not valid."},
}


async def _post(request: Request, thread_id: Id, question: Question) -> Response:
    """Ask the agent, and wait for its answer."""
    run = _start(request, thread_id, question)
    try:
        return _last_answer(await _unless_gone(request, run.last()))
    finally:
        await run.close()


async def _stream(request: Request, thread_id: Id, question: Question) -> Response:
    """Ask the agent, and stream what happens.

    A run that is refused before its first event is answered as without streaming.
    """
    run = _start(request, thread_id, question)
    handed_over = False
    try:
        events = aiter(run)
        first = await _unless_gone(request, anext(events))
        if isinstance(first, Refused | Failed):
            return _last_answer(first)
        handed_over = True
        return _EventStream(run, first, events)
    finally:
        if not handed_over:
            await run.close()


async def _usage(request: Request, thread_id: Id) -> Usage:
    """What a thread has used."""
    config = {"configurable": {"thread_id": thread_id}}
    snapshot = await request.app.state.agent.aget_state(config)
    if not snapshot.values:
        raise HTTPException(404, "there is no such thread")
    used = usage(snapshot)
    counts = {"model": used.model, **used.tools, **used.spent}
    return Usage(
        thread_id=thread_id,
        thread=_counts(used.model, used.tools, used.spent),
        run=_counts(used.run_model, used.run_tools, used.run_spent),
        limits=[
            Limited(
                limit=each.name,
                unit=unit_of(each.unit),
                used=counts.get(each.counter, 0),
                limit_value=each.thread_limit,
            )
            for each in request.app.state.limits
            if each.thread_limit is not None
        ],
    )


def _counts(model: int, tools: Mapping[str, int], spent: Mapping[str, int]) -> Counts:
    return Counts(
        model=model,
        tools=dict(tools),
        tokens=spent.get(TOKENS, 0),
        dollars=spent.get(CostLimit.counter, 0) / NANODOLLARS,
    )


async def _alive() -> dict[str, str]:
    """Whether the process answers."""
    return {"status": "alive"}


async def _ready(request: Request) -> JSONResponse:
    """Whether the databases that the service needs answer, too."""
    checks = request.app.state.checks
    answers = await asyncio.gather(*map(reachable, checks.values()))
    body = {name: "ok" if ok else "failed" for name, ok in zip(checks, answers, strict=True)}
    return JSONResponse(body, 200 if all(answers) else 503)


def _start(request: Request, thread_id: str, question: Question) -> Run:
    try:
        run: Run = request.app.state.runs.start(thread_id, question)
    except BusyError:
        raise HTTPException(
            409, "a run is going on on this thread", headers={"Retry-After": "1"}
        ) from None
    return run


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of some work, unless the client hangs up before."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(CLIENT_CLOSED_REQUEST)
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _last_answer(last: Shape) -> JSONResponse:
    body = last.model_dump(mode="json")
    if isinstance(last, Refused):
        return JSONResponse(body, last.error.status, headers=last.error.headers())
    return JSONResponse(body, 500 if isinstance(last, Failed) else 200)


class _EventStream(StreamingResponse):
    """The rest of a run as server-sent events; a client that hangs up cancels it."""

    def __init__(self, run: Run, first: Shape, rest: AsyncIterator[Shape]) -> None:
        async def told() -> AsyncIterator[str]:
            yield _event(first)
            async for event in rest:
                yield _event(event)

        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(told(), media_type="text/event-stream", headers=headers)
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._run.close()


def _event(event: Shape) -> str:
    # JSON has no line breaks: one line of data is enough.
    return f"event: {_EVENTS[type(event)]}\ndata: {event.model_dump_json()}\n\n"


class _Guarded:
    """An app for clients with the token; an instance, so that Starlette takes it as a route.

    Args:
        app: The app.
        token: The token.
        scheme: `"bearer"`, or `"basic"`, where the token is the password of any user.
    """

    def __init__(self, app: ASGIApp, *, token: str, scheme: str = "bearer") -> None:
        self._app = app
        self._token = token.encode()
        self._scheme = scheme

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        shown = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = shown.partition(b" ")
        if self._scheme == "basic":
            with suppress(ValueError):
                token = b64decode(token).partition(b":")[2]
        is_right = hmac.compare_digest(token.strip(), self._token)
        if scheme.lower() == self._scheme.encode() and is_right:
            await self._app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": f'{self._scheme.capitalize()} realm="metrics"'}
        response = _problem(401, "unauthorized", "show the token", headers)
        await response(scope, receive, send)


def _problem(
    status: int, kind: str, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    shape = Failed(error=Problem(type=kind, message=message))
    return JSONResponse(shape.model_dump(), status, headers=headers)


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    told = error.errors() if isinstance(error, RequestValidationError) else []
    # Without duplicates, and without the client's own values or unknown names.
    lines = dict.fromkeys(
        f"{'.'.join(str(part) for part in each['loc'] if part in _KNOWN)}: {each['msg']}"
        for each in told
    )
    return _problem(422, "invalid_request", "; ".join(lines))


async def _http_problem(_: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    status, kind = _PROBLEMS.get(error.status_code, (error.status_code, "http_error"))
    return _problem(status, kind, str(error.detail), error.headers)


async def _internal_error(_: Request, error: Exception) -> JSONResponse:  # noqa: ARG001 - it is logged by the server
    return _problem(500, "internal_error", "the request failed")

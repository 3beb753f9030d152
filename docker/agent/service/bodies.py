"""Request bodies, bounded before anything reads them."""

import asyncio

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.shapes import Failed, Problem

MAX_BODY = 64 * 1024
MAX_DRAINED = 8 * 1024 * 1024
READ_SECONDS = 10


class BoundedBodies:
    """ASGI middleware: refuses bodies that are too large or too slow, declared so or not.

    Args:
        app: The app.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(READ_SECONDS):
                body = await _read(receive)
        except TimeoutError:
            await _refuse(408, "body_too_slow", "the body did not arrive in time")(
                scope, receive, send
            )
            return
        if body is None:
            return  # the client is gone
        if len(body) > MAX_BODY:
            text = f"the body may have {MAX_BODY} bytes"
            await _refuse(413, "body_too_large", text)(scope, receive, send)
            return
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        await self._app(scope, replay, send)


async def _read(receive: Receive) -> bytes | None:
    """The body; if it is too large, only as much of it as shows that."""
    body = b""
    drained = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part: bytes = message.get("body", b"")
        body += part[: MAX_BODY + 1 - len(body)]
        # Reading on for a while lets a client that is still sending read the answer.
        drained += len(part)
        if not message.get("more_body") or drained > MAX_DRAINED:
            return body


def _refuse(status: int, kind: str, message: str) -> JSONResponse:
    shape = Failed(error=Problem(type=kind, message=message))
    return JSONResponse(shape.model_dump(), status, headers={"Connection": "close"})

"""A web server of a test's own."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Request(BaseHTTPRequestHandler):
    """A request, which is read and answered by a function."""

    answer: Callable[["Request"], None]

    def do_POST(self) -> None:
        """Read it, and have it answered; who was killed while asking gets no answer."""
        length = int(self.headers["content-length"])
        self.body = self.rfile.read(length)
        if len(self.body) == length:
            type(self).answer(self)

    do_PUT = do_POST  # noqa: N815 - the name that the library looks for

    def reply(self, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Begin an answer."""
        self.send_response_only(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 128


@contextmanager
def serving(answer: Callable[[Request], None]) -> Iterator[str]:
    """Have a function answer all that is posted or put to a free port; gives the URL."""
    kind = type("Handler", (Request,), {"answer": staticmethod(answer)})
    with _Server(("127.0.0.1", 0), kind) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()

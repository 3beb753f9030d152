"""A way to a server on which things go wrong, as they do in networks, until it is healed."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

Fault = Callable[[bytes], Iterable[bytes]]
"""Makes of a reply the pieces that arrive in its place."""


def lost(reply: bytes) -> Iterable[bytes]:
    """The reply never arrives."""
    return ()


def piecemeal(reply: bytes) -> Iterable[bytes]:
    """The reply arrives byte by byte."""
    return (reply[at : at + 1] for at in range(len(reply)))


def reset(reply: bytes) -> Iterable[bytes]:
    """Half of the reply arrives, and then the connection is reset."""
    yield reply[: len(reply) // 2]
    raise ConnectionResetError


def replaced(by: bytes) -> Fault:
    """Something else arrives."""
    return lambda reply: (by,)


def late(seconds: float) -> Fault:
    """The reply arrives after a while."""

    def fault(reply: bytes) -> Iterable[bytes]:
        time.sleep(seconds)
        yield reply

    return fault


class Proxy:
    """Passes on to a server what it is sent, and back what the server replies, unless it is faulty.

    Requests with `hold` in them are held up, and arrive even when their sender has gone.
    """

    def __init__(self, port: int, hold: bytes = b"") -> None:
        self._server = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends = ExitStack()
        self._ends.callback(self._listener.close)
        self._fault: Fault | None = None
        self._swallows = False
        self._hold = hold
        self._open = threading.Event()
        self.held = threading.Event()
        self.port = int(self._listener.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.replies = 0  # that came back from the server, heard or not
        # In threads: an event loop that is blocked does not hold it up.
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def open(self) -> None:
        """Let through what was held up, and all that comes."""
        self._open.set()

    def fail(self, fault: Fault) -> None:
        """Do this to replies from now on."""
        self._fault = fault

    def blackhole(self) -> None:
        """Accept connections and requests from now on, and let nothing arrive."""
        self._swallows = True

    def heal(self) -> None:
        """Pass on again what comes; what was swallowed stays so."""
        self._fault = None
        self._swallows = False

    def end(self) -> None:
        """Let nobody pass any more."""
        self._open.set()
        with suppress(OSError):  # wakes who waits for a connection
            self._listener.shutdown(socket.SHUT_RDWR)
        # What it accepts last is closed, too.
        self._accepting.join()
        self._ends.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._server)
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._ends.callback(_close, end)
                threading.Thread(target=self._forth, args=(near, far), daemon=True).start()
                threading.Thread(target=self._back, args=(far, near), daemon=True).start()

    def _forth(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while request := near.recv(65_536):
                if self._hold and self._hold in request:
                    self.held.set()
                    self._open.wait()
                if not self._swallows:
                    far.sendall(request)
        if not self._hold:
            _close(far)

    def _back(self, far: socket.socket, near: socket.socket) -> None:
        with suppress(OSError):
            while reply := far.recv(65_536):
                self.replies += 1
                try:
                    for piece in self._fault(reply) if self._fault else (reply,):
                        near.sendall(piece)
                except ConnectionResetError:
                    # Closed like this, the other side is told of a reset, not of an end.
                    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    break
        _close(near)


def _close(end: Any) -> None:
    with suppress(OSError):  # wakes the thread that reads from it
        end.shutdown(socket.SHUT_RD)
    end.close()


@contextmanager
def proxy(port: int, hold: bytes = b"") -> Iterator[Proxy]:
    """A way to a server that can be made faulty."""
    way = Proxy(port, hold)
    try:
        yield way
    finally:
        way.end()

"""HTTP servers on real sockets: a scriptable one, whose bytes, delays and ends are up to the test, and any ASGI one."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

RESET = object()  # in a reply: close the connection with a TCP reset

Piece = bytes | float | object  # bytes to send, seconds to wait, or RESET


@dataclass(frozen=True)
class Request:
    """What the server was asked. `number` counts from 0 over the server's life."""

    number: int
    method: str
    path: str
    body: dict[str, Any]  # JSON bodies only


Script = Callable[[Request], Iterable[Piece]]


class FakeServer:
    """Answers every request with the pieces that `script` returns, then closes the connection.

    with FakeServer(lambda request: json_reply({...})) as server:
        server.url, server.requests
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self.requests: list[Request] = []
        self.active = self.most_active = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            request = self._read(connection)
            if request is None:
                return
            try:
                for piece in self._script(request):
                    self._send(connection, piece)
            except OSError:
                pass  # the client left first
            finally:
                with self._lock:
                    self.active -= 1

    def _read(self, connection: socket.socket) -> Request | None:
        with connection.makefile("rb") as file:
            first = file.readline().split()
            if not first:
                return None
            length = 0
            while (line := file.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            body = file.read(length)
        with self._lock:
            content = json.loads(body) if body.startswith(b"{") else {}
            request = Request(len(self.requests), first[0].decode(), first[1].decode(), content)
            self.requests.append(request)
            self.active += 1
            self.most_active = max(self.most_active, self.active)
        return request

    def _send(self, connection: socket.socket, piece: Piece) -> None:
        if piece is RESET:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        elif isinstance(piece, bytes):
            connection.sendall(piece)
        else:
            time.sleep(piece)


@contextmanager
def app_server(app: Any) -> Iterator[str]:
    """Serve an ASGI application on a real port, in a thread of the test; yield the base URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def http(content: bytes, status: int = 200, kind: str = "application/json", length: int | None = None) -> list[bytes]:
    """A whole response; a `length` that is not the content's makes a body that breaks off."""
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nConnection: close\r\n"
    return [f"{head}Content-Length: {len(content) if length is None else length}\r\n\r\n".encode(), content]


def json_reply(body: Any, status: int = 200) -> list[bytes]:
    """A JSON response (NaN and infinity are written as Python writes them)."""
    return http(json.dumps(body).encode(), status)


def sse_head() -> bytes:
    """The head of a stream that lasts until the connection closes."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def sse_reply(payloads: Iterable[Any], done: bool = True) -> list[bytes]:
    """A stream of JSON payloads, one event each."""
    frames = [b"data: " + json.dumps(payload).encode() + b"\n\n" for payload in payloads]
    return [sse_head(), *frames, *([b"data: [DONE]\n\n"] if done else [])]


def chat_body(text: str | None = "Hi", finish: str | None = "stop", **choice: Any) -> dict[str, Any]:
    """A plain chat answer; `choice` adds to or overrides the choice's fields."""
    message = {"role": "assistant", "content": text}
    return {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": finish} | choice],
    }


def chat_chunk(text: str | None = None, finish: str | None = None, **choice: Any) -> dict[str, Any]:
    """One chunk of a chat stream."""
    delta = {} if text is None else {"content": text}
    choices = [{"index": 0, "delta": delta, "finish_reason": finish} | choice]
    return {"object": "chat.completion.chunk", "choices": choices}


def unused_port() -> int:
    """A port that nothing listens on (it was free a moment ago)."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]

"""An image registry on the loopback, read-only, that breaks on demand. Engines pull from it without TLS.

Routes: https://github.com/opencontainers/distribution-spec
"""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from built_image import MANIFEST_TYPE, BuiltImage, sha256

REPOSITORY = "assay/served"


class LoopbackRegistry:
    """`push` puts an image in; `alter` changes the bytes that are sent for a digest; `down` answers 503 to all."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}
        self._tags: dict[str, str] = {}
        self.sent: list[str] = []  # what was asked for, in order
        self.reset()
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                registry._answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def repository(self) -> str:
        """Full name of the one repository."""
        return f"127.0.0.1:{self._server.server_port}/{REPOSITORY}"

    def __enter__(self) -> LoopbackRegistry:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def push(self, image: BuiltImage, tag: str) -> None:
        """Hold `image`, and let `tag` mean it."""
        self._blobs |= {sha256(blob): blob for blob in (image.layer, image.config, image.manifest)}
        self._tags[tag] = image.digest

    def alter(self, blob: bytes) -> None:
        """Send something else under the digest of `blob`: a byte more of white space, which changes no meaning."""
        self._altered.add(sha256(blob))

    def reset(self) -> None:
        """Be a good registry again."""
        self._altered: set[str] = set()
        self.down = False

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        self.sent.append(request.path)
        found = re.fullmatch(rf"/v2/{REPOSITORY}/(manifests|blobs)/(.+)", request.path)
        if self.down:
            return _reply(request, 503, _error("UNAVAILABLE"), "application/json")
        if request.path == "/v2/":
            return _reply(request, 200, b"{}", "application/json")
        digest = self._tags.get(found[2], found[2]) if found else ""
        blob = self._blobs.get(digest)
        if blob is None:
            return _reply(request, 404, _error("MANIFEST_UNKNOWN"), "application/json")
        if digest in self._altered:
            blob += b" " if blob.endswith(b"}") else bytes(512)
        kind = MANIFEST_TYPE if found[1] == "manifests" else "application/octet-stream"
        return _reply(request, 200, blob, kind, digest)


def _error(code: str) -> bytes:
    # Without a detail, engines take an unknown manifest for a fault of the registry.
    return json.dumps({"errors": [{"code": code, "message": code, "detail": {"of": "a test"}}]}).encode()


def _reply(request: BaseHTTPRequestHandler, status: int, body: bytes, kind: str, digest: str = "") -> None:
    request.send_response(status)
    request.send_header("Content-Type", kind)
    request.send_header("Content-Length", str(len(body)))
    request.send_header("Docker-Distribution-Api-Version", "registry/2.0")
    if digest:
        request.send_header("Docker-Content-Digest", digest)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)

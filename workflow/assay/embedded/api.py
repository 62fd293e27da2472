"""What every embedded server answers beside the route it is for, in the shapes of OpenAI's API. Without torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse


class ApiError(Exception):
    """An error to answer with. A planted fault raises it too, with status 200 if it likes."""

    def __init__(self, code: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "server_error" if self.code >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def create_api(
    title: str,
    served_name: str,
    versions: Callable[[], Mapping[str, str | None]],
    state: Callable[[], tuple[str | None, int]],
    **facts: Any,
) -> FastAPI:
    """A server of one model, without the route that it is for.

    Args:
        title: of the server.
        served_name: what requests call the model.
        versions: asked by /version.
        state: asked by /health: what stopped the engine, or None; requests that run.
        facts: further fields of the model's entry in /v1/models.
    """
    app = FastAPI(title=title)
    entry = {"id": served_name, "object": "model", "created": int(time.time()), "owned_by": "assay"} | facts

    @app.exception_handler(ApiError)
    async def api_error(_: object, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.code)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: object, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:])
        return JSONResponse(ApiError(400, f"{param or 'body'}: {first['msg']}", param or None).body, 400)

    @app.get("/health")
    async def health() -> JSONResponse:
        error, running = state()
        return JSONResponse({"status": error or "ok", "running": running}, 503 if error else 200)

    @app.get("/version")
    async def version() -> Mapping[str, str | None]:
        return versions()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    return app


def check_model(asked: str, served_name: str) -> None:
    """Refuse a request for another model.

    Raises:
        ApiError: 404.
    """
    if asked != served_name:
        raise ApiError(404, f"the model '{asked}' does not exist; this server has '{served_name}'", "model")

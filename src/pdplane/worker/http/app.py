"""A worker's HTTP edge: the paths of SGLang's workers and OpenAI's API over one `Service`."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdplane.core.errors import Cause

from ..service import Service
from .exchange import error_response
from .inference import Inference
from .operations import Operations
from .operator import Operator
from .settings import HttpSettings

_CODES = {404: "not_found", 405: "method_not_allowed"}


def build_app(service: Service, settings: HttpSettings | None = None) -> Starlette:
    settings = settings or HttpSettings()
    operations, operator = Operations(service, settings), Operator(service, settings.admin_key)
    app = Starlette(
        routes=[
            Route("/generate", Inference("generate", service, settings), methods=["POST"]),
            Route("/v1/chat/completions", Inference("chat", service, settings), methods=["POST"]),
            Route("/v1/completions", Inference("completions", service, settings), methods=["POST"]),
            Route("/abort_request", operations.abort, methods=["POST"]),
            Route("/v1/kv/release", operations.release_holds, methods=["POST"]),
            Route("/drain", operator.drain, methods=["POST"]),
            Route("/release", operator.release, methods=["POST"]),
            Route("/v1/models", operations.models),
            Route("/v1/models/{model:path}", operations.model),
            Route("/health", operations.health),
            Route("/health_generate", operations.health_generate),
            Route("/server_info", operations.server_info),
            Route("/get_server_info", operations.server_info),
            Route("/model_info", operations.model_info),
            Route("/get_model_info", operations.model_info),
            Route("/metrics", operations.metrics),
            Route("/requests/{key:path}", operations.record),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _internal_error},
    )
    app.router.redirect_slashes = False
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail.lower()}"
    response = error_response(Cause(_CODES.get(error.status_code, "http_error"), message, error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _internal_error(request: Request, error: Exception) -> Response:
    return error_response(Cause("internal_error", f"this worker failed: {type(error).__name__}", 500))

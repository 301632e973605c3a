"""The application of the admin surface: its paths, made from the table of operations, and their description."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from fastapi import FastAPI, Request, Response
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from flowctl.control.arguments import Argument
from flowctl.control.operations import OPERATIONS, Operation, Permission
from flowctl.live.admin.asking import CallRefused, OperationAsker
from flowctl.live.admin.guard import EVENTS, Guard, Receive, Scope, Send, Tokens
from flowctl.live.admin.metrics import Metrics
from flowctl.live.admin.models import ANSWERS, Anything, OneConnection, Problem
from flowctl.live.admin.streaming import EventStreams

ASSETS: Final = Path(__file__).with_name("assets")
API: Final = "/api/v1"
_NOT_STATIC: Final = ("/api/", "/metrics", "/openapi.json", "/healthz", "/readyz")
_JSON: Final = "application/json"
_Number: TypeAlias = Annotated[int, PathParameter(ge=1, le=10**18 - 1)]
_OWN_PATH_OPERATIONS: Final = frozenset({"events", "metrics"})
"""Operations that have a path of their own."""
_SHOWING_OPERATIONS: Final = frozenset({"limits"})
"""Operations that show the state when they are called with nothing to set."""
_SHOWN_BY: Final = frozenset({"connection", "stream"})
_PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": Problem, "description": what}
    for status, what in (
        (400, "The request makes no sense."),
        (401, "A token is missing or wrong."),
        (403, "The caller may not do this."),
        (404, "There is no such thing."),
        (409, "It cannot be done."),
        (413, "The request is too long."),
        (415, "The body is not JSON."),
        (421, "The Host is not ours."),
        (422, "An argument is wrong."),
        (431, "The head of the request is too long."),
        (500, "The server has failed."),
        (503, "The server is busy, or ends."),
    )
}


class AdminApp:
    """The ASGI application of the admin surface."""

    def __init__(self, asking: OperationAsker, tokens: Tokens | None) -> None:
        self._asking: Final = asking
        self._version = "unknown"
        with contextlib.suppress(PackageNotFoundError):
            self._version = version("flowctl")
        self._metrics: Final = Metrics(self._version)
        self._writes: Final = asyncio.Lock()  # one at a time writes metrics
        self.streams: Final = EventStreams(asking)
        # Anybody may ask whether it is ready, so all who do at a time have one answer.
        self._look_ready: asyncio.Task[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        app = FastAPI(
            title="flowctl admin API",
            version=self._version,
            docs_url=None,  # their pages come from other hosts
            redoc_url=None,
            openapi_url="/openapi.json",
        )
        for kind in (CallRefused, HTTPException, RequestValidationError, Exception):
            app.add_exception_handler(kind, _answer_problem)
        self._add_operations(app)
        self._add_health(app)
        app.mount("/", StaticFiles(directory=ASSETS, html=True, check_dir=False))
        self.api: Final = app
        self._guard: Final = Guard(app=app, tokens=tokens, is_static=lambda path: not path.startswith(_NOT_STATIC))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._loop = asyncio.get_running_loop()
        await self._guard(scope, receive, send)

    def end(self) -> None:
        """End the streams of events. Any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.streams.end)

    # -- paths

    def _add_operations(self, app: FastAPI) -> None:
        for operation in OPERATIONS:
            if operation.name in _OWN_PATH_OPERATIONS:
                continue
            if operation.looks or operation.name in _SHOWING_OPERATIONS:
                self._add(app, "GET", operation, self._look(operation))
            if not operation.looks:
                self._add(app, "POST", operation, self._change(operation))

        async def one(request: Request, connection: _Number) -> Response:
            try:
                made = await self._asking.ask("connections", {"connection": connection}, _permission(request))
            except CallRefused as error:
                if error.said["code"] != "NOT_POSSIBLE":
                    raise
                raise CallRefused("NOT_FOUND", str(error), error.said["hint"]) from error
            return Response(made, media_type=_JSON)

        app.add_api_route(f"{API}/connections/{{connection}}", one, response_model=OneConnection, responses=_PROBLEMS)
        app.add_api_route(EVENTS, self._events, response_class=Response, responses=_PROBLEMS | _STREAM)

    def _add(
        self, app: FastAPI, method: str, operation: Operation, endpoint: Callable[..., Awaitable[Response]]
    ) -> None:
        arguments = operation.arguments
        if method == "GET" and not operation.looks:
            arguments = tuple(item for item in arguments if item.name in _SHOWN_BY)
        described = {"parameters": [_parameter(item) for item in arguments]} if method == "GET" else _body_of(arguments)
        app.add_api_route(
            f"{API}/{operation.name}",
            endpoint,
            methods=[method],
            name=f"{operation.name}_{method.lower()}",
            summary=operation.summary,
            response_model=ANSWERS.get(operation.name, Anything),
            responses=_PROBLEMS,
            openapi_extra={**described, "x-permission": operation.permission.name.lower()},
        )

    def _look(self, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
        async def look(request: Request) -> Response:
            given = _query(request)
            if not operation.looks:
                given = {name: value for name, value in given.items() if name in _SHOWN_BY}
            made = await self._asking.ask(operation.name, given, _permission(request))
            return Response(made, media_type=_JSON)

        return look

    def _change(self, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
        async def change(request: Request) -> Response:
            made = await self._asking.ask(operation.name, await _arguments(request), _permission(request))
            return Response(made, media_type=_JSON)

        return change

    async def _events(self, request: Request) -> Response:
        """Send events as they come; ``Last-Event-ID`` goes on where one was."""
        if _permission(request) < Permission.BASIC:
            raise CallRefused("FORBIDDEN", "events take the level basic")
        if not self.streams.has_room(request.state.caller):
            message = f"{self.streams.count} listen to events already, and the rest is for other callers"
            raise CallRefused("BUSY", message, "end one of yours, or use a token of your own")
        return _Stream(self.streams)

    def _add_health(self, app: FastAPI) -> None:
        async def healthz() -> dict[str, str]:
            """Return that the process is there."""
            return {"status": "ok"}

        async def readyz() -> JSONResponse:
            """Return whether new connections are taken: not while the server drains."""
            try:
                if self._look_ready is None or self._look_ready.done():
                    asked = self._asking.ask("stats", {"stream": "", "viewers": "none"})
                    self._look_ready = asyncio.get_running_loop().create_task(asked)
                found = await asyncio.shield(self._look_ready)
            except CallRefused as error:
                return JSONResponse({"status": str(error.said["code"]).lower()}, 503)
            drains = "drains_for_s" in json.loads(found)["server"]
            return JSONResponse({"status": "draining" if drains else "ready"}, 503 if drains else 200)

        async def metrics(request: Request) -> Response:
            said = json.loads(await self._asking.ask("metrics", {}, _permission(request)))
            loop = asyncio.get_running_loop()
            async with self._writes:
                text = await loop.run_in_executor(None, self._metrics.text, said)
            return Response(text, media_type=_PROMETHEUS)

        app.add_api_route("/metrics", metrics, response_class=Response, responses=_PROBLEMS | _METRICS)
        app.add_api_route("/healthz", healthz)
        app.add_api_route("/readyz", readyz, responses={503: {"description": "It drains, or does not answer."}})


class _Stream(Response):
    """A response that goes on."""

    def __init__(self, streams: EventStreams) -> None:
        super().__init__()
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._streams.serve(scope, receive, send)


_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
_METRICS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "Metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}
_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "Events: state, drops, late, return, limit, publish, close, change, and lost: how many were not "
        "sent to this listener.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


def _permission(request: Request) -> Permission:
    found: Permission = request.state.permission
    return found


def _query(request: Request) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in given:
            raise CallRefused("WRONG_ARGUMENT", f"{name[:80]!r} is given twice")
        given[name] = value
    return given


async def _arguments(request: Request) -> Mapping[str, Any]:
    body = await request.body()
    try:
        value = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError) as error:
        raise CallRefused("WRONG_ARGUMENT", "the body is no JSON") from error
    if not isinstance(value, dict):
        raise CallRefused("WRONG_ARGUMENT", "the body is no JSON object")
    return value


def _parameter(argument: Argument) -> dict[str, Any]:
    schema = dict(argument.kind.schema)
    if argument.default is not None:
        schema["default"] = argument.default
    return {
        "name": argument.name,
        "in": "query",
        "required": argument.required,
        "description": argument.what,
        "schema": schema,
    }


def _body_of(arguments: tuple[Argument, ...]) -> dict[str, Any]:
    properties = {item.name: {**item.kind.schema, "description": item.what} for item in arguments}
    schema = {
        "type": "object",
        "properties": properties,
        "required": [item.name for item in arguments if item.required],
        "additionalProperties": False,
    }
    required = bool(schema["required"])
    return {"requestBody": {"required": required, "content": {_JSON: {"schema": schema}}}}


async def _answer_problem(request: Request, error: Any) -> Response:
    """Answer what the application has raised; of a fault of ours uvicorn logs the rest."""
    del request
    headers = None
    if isinstance(error, HTTPException):
        code = {404: "NOT_FOUND", 405: "WRONG_METHOD", 413: "TOO_LONG"}.get(error.status_code, "FAILED")
        headers = error.headers
        error = CallRefused(code, str(error.detail), status=error.status_code)
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        error = CallRefused("WRONG_ARGUMENT", f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    elif not isinstance(error, CallRefused):
        error = CallRefused("FAILED", "the server has failed", "its log says how")
    if error.status == 503:
        headers = {"retry-after": "1"}
    return JSONResponse(error.said, error.status, headers)

"""The ASGI application of one worker."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response

from api.client import EngineClient
from api.engines import EngineView
from api.errors import EngineUnavailableError
from api.http import chat as chats
from api.http import metrics
from api.http.answers import Asked, ClientGoneError, EventStream, answer_once
from api.http.bodies import Loans, receive
from api.http.errors import HttpError, bad, http_error
from api.http.gate import Gate
from api.http.middleware import Requests
from api.http.settings import Settings
from api.http.status import status
from api.http.tasks import CONTENT_TYPES, decode_json, read_task
from fmq.calls import described
from fmq.metrics import QueueMetrics

_MAX_CHOICES = 128
_LAG_SECONDS = 0.05
_NO_CONTENT = 499
"""Nobody gets it: the client is gone."""

_BODY = {"requestBody": {"required": True, "content": {kind: {} for kind in CONTENT_TYPES}}}
_JSON_BODY = {"requestBody": {"required": True, "content": {"application/json": {}}}}


MakeClient = Callable[[Settings], EngineClient]


class Worker:
    """What one worker has: its client of the engines, its place at the gate, its settings."""

    def __init__(self, settings: Settings, make_client: MakeClient) -> None:
        self.settings = settings
        self._make_client = make_client
        self.started = int(time.time())
        self.gate = Gate(settings)
        self.client: EngineClient | None = None
        self._lag: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Make the rings. Raises as EngineClient does."""
        self.client = self._make_client(self.settings)
        await self.client.start()
        self._lag = asyncio.create_task(_watch_lag(), name="loop-lag")

    async def close(self) -> None:
        """Abort what is not answered, and let go of the rings."""
        if self._lag is not None:
            self._lag.cancel()
        if self.client is not None:
            await self.client.close()
        self.gate.close()

    @property
    def engines(self) -> list[EngineView]:
        """The engines, as this worker sees them."""
        return [] if self.client is None else list(self.client.links)

    async def ask(
        self, request: Request, task: Any, *, loans: Loans, choices: int = 1, timeout: float | None = None
    ) -> Asked:
        """Send a task to the engine that ``loans`` belongs to."""
        assert self.client is not None
        engine_id = await self.client.send_task(
            task,
            # The client's ids may repeat.
            request_id=f"{request_id(request)}-{secrets.token_hex(4)}",
            choices=choices,
            timeout=timeout or self.settings.request_timeout,
            put_timeout=self.settings.put_timeout,
            engine=loans.link,
        )
        return Asked(self.client, engine_id)

    def loans(self) -> Loans:
        """Room in the ring to the engine that is to have the next request. Raises EngineUnavailableError."""
        assert self.client is not None
        return Loans(self.client.choose(), self.settings.put_timeout)


async def _watch_lag() -> None:
    """Measure by how much the event loop is late: what holds it up, holds up everybody."""
    while True:
        due = time.perf_counter() + _LAG_SECONDS
        await asyncio.sleep(_LAG_SECONDS)
        metrics.LOOP_LAG.observe(max(0.0, time.perf_counter() - due))


def request_id(request: Request) -> str:
    """The id that the client gave, or that was given to it."""
    return str(request.scope["state"]["request_id"])


def new_client(settings: Settings) -> EngineClient:
    """A client of the engines, as the settings say."""
    return EngineClient(
        settings.engines,
        namespace=settings.namespace,
        ring_size=settings.ring_size,
        spill_limit=settings.spill_limit,
        patience=settings.patience,
        metrics=QueueMetrics(),
    )


def create_app(settings: Settings | None = None, make_client: MakeClient = new_client) -> FastAPI:
    """The application, for uvicorn, one in each worker process. Settings: by default the environment's."""
    settings = Settings.from_environment() if settings is None else settings
    worker = Worker(settings, make_client)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await worker.start()
            yield
        finally:
            await worker.close()

    app = FastAPI(
        title="shmq",
        summary="Large requests, through shared memory, to an engine.",
        lifespan=lifespan,
        docs_url="/docs",
        redoc_url=None,
    )
    app.add_middleware(Requests, gate=worker.gate)
    app.add_exception_handler(HTTPException, _starlette_error)
    app.add_exception_handler(RequestValidationError, _query_error)
    for kind in (HttpError, ClientDisconnect, ClientGoneError):
        app.add_exception_handler(kind, _told_error)
    _add_v1(app, worker)
    _add_health(app, worker)
    return app


def _add_v1(app: FastAPI, worker: Worker) -> None:
    @app.post("/v1/tasks", openapi_extra=_BODY, response_model=None)
    async def tasks(
        request: Request,
        stream: Annotated[bool, Query(description="Answer with server-sent events.")] = False,
        n: Annotated[int, Query(ge=1, le=_MAX_CHOICES, description="Independent answers.")] = 1,
        timeout: Annotated[float | None, Query(gt=0, le=86400, description="Deadline, seconds.")] = None,
    ) -> Response:
        """Have a task done. The body is the task: JSON, a form, or arrays."""
        with _told():
            loans = worker.loans()
            task = await read_task(request, loans, worker.settings)
            asked = await worker.ask(request, task, loans=loans, choices=n, timeout=timeout)
            del task
            if stream:
                return EventStream(request_id(request), asked, _described)
            return await answer_once(request, asked, lambda outputs: _document(request_id(request), outputs))

    @app.post("/v1/chat/completions", openapi_extra=_JSON_BODY, response_model=None)
    async def completions(request: Request) -> Response:
        """The next message of a conversation, as OpenAI's clients ask for it."""
        with _told():
            loans = worker.loans()
            body = await receive(request, loans, worker.settings.max_json)
            chat = decode_json(body, chats.ChatRequest)
            del body
            chats.check_model(chat, worker.settings)
            task = await chats.chat_task(chat, loans, worker.settings)
            completion = chats.Completion(chat, request_id(request))
            asked = await worker.ask(request, task, loans=loans, choices=chat.n or 1)
            del task
            if chat.stream:
                return EventStream(request_id(request), asked, completion.stream)
            return await answer_once(request, asked, completion.whole)

    @app.get("/v1/models", response_model=None)
    async def models() -> dict[str, Any]:
        """The one model that is served here."""
        return chats.models(worker.settings, worker.started)


def _add_health(app: FastAPI, worker: Worker) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"], response_model=None)
    async def health() -> Response:
        """Whether an engine's receive loop turns, by its heartbeat in shared memory."""
        return _health(worker.engines)

    @app.api_route("/ready", methods=["GET", "HEAD"], response_model=None)
    async def ready() -> Response:
        """Whether this worker can take a request now."""
        try:
            worker.loans()
        except EngineUnavailableError as error:
            return _json({"ready": False, "reason": str(error)}, 503)
        return _json({"ready": True}, 200)

    @app.get("/metrics", response_model=None)
    async def prometheus() -> Response:
        """For Prometheus."""
        return Response(metrics.exposition(worker.engines), media_type=CONTENT_TYPE_LATEST)

    @app.get("/status.json", response_model=None)
    async def status_json() -> Response:
        """What /status shows."""
        return _json(status(worker.engines, worker.gate, worker.settings), 200)

    page = files("api.http").joinpath("status.html").read_text()

    @app.get("/status", response_model=None)
    async def status_page() -> Response:
        """Queues, rings and rates, live."""
        return HTMLResponse(page)


def _health(engines: list[EngineView]) -> Response:
    for engine in engines:
        engine.look()
    serving = sum(engine.serving for engine in engines)
    word = "ok" if serving == len(engines) else "degraded" if serving else "down"
    return _json({"status": word, "engines": [engine.describe() for engine in engines]}, 200 if serving else 503)


def _json(document: Any, code: int) -> Response:
    return Response(msgspec.json.encode(document), code, media_type="application/json")


async def _described(outputs: AsyncIterator[Any]) -> AsyncIterator[dict[str, Any]]:
    async for output in outputs:
        item = described(output)
        del item["request_id"], item["failure"]
        yield item


def _document(request_id: str, outputs: list[Any]) -> dict[str, Any]:
    choices: dict[int, list[Any]] = {}
    for output in outputs:
        choices.setdefault(output.choice, []).append(output.value)
    return {
        "request_id": request_id,
        "choices": [{"choice": choice, "outputs": choices[choice]} for choice in sorted(choices)],
    }


@contextlib.contextmanager
def _told() -> Any:
    """Errors of the client and the transport, as the HttpError that says so."""
    try:
        yield
    except (ClientDisconnect, ClientGoneError):
        raise
    except Exception as error:
        told = http_error(error)
        if told is None:
            raise
        raise told from error


async def _told_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HttpError):
        return error.response(request_id(request))
    return Response(status_code=_NO_CONTENT)


async def _query_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return bad(f"{place}: {first['msg']}", place).response(request_id(request))


async def _starlette_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "not_found" if error.status_code == 404 else "invalid_request_error"
    response = HttpError(error.status_code, kind, str(error.detail)).response(request_id(request))
    response.headers.update(error.headers or {})
    return response

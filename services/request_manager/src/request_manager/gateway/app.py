"""The routes, and what is wired to them. Knows HTTP; must not know text, tokens or sampling."""

from http import HTTPStatus

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from request_manager.contract import Manager, ModelCard
from request_manager.gateway.answer import Answerer, Sources
from request_manager.gateway.chat import ChatDialect
from request_manager.gateway.completions import CompletionDialect
from request_manager.gateway.envelope import Envelope
from request_manager.gateway.errors import error_code, error_response
from request_manager.gateway.grammar_fields import GrammarChecker
from request_manager.gateway.keys import ApiKeys, KeyGuard
from request_manager.gateway.metrics import GatewayMetrics
from request_manager.gateway.openapi import document
from request_manager.gateway.settings import GatewaySettings
from request_manager.gateway.text import TextCodec
from treecore.errors import Unavailable
from treecore.service.operations import metrics_page

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def create_app(
    manager: Manager,
    text: TextCodec,
    settings: GatewaySettings,
    registry: CollectorRegistry,
    sources: Sources | None = None,
    grammars: GrammarChecker | None = None,
) -> FastAPI:
    """The gateway. `text` belongs to the manager's LLM; /metrics shows all of `registry`.

    grammars: checks what structured output asks for, in a thread; None: every such request is refused.

    Raises ConfigError for API keys that cannot be read. Starts nothing and owns no task outside a request, so it needs
    no lifespan. One app per registry.
    """
    app = FastAPI(title="Espalier", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    metrics = GatewayMetrics(registry)
    _add_generation(app, Answerer(manager, text, settings, metrics, sources or Sources(), grammars))
    _add_models(app, manager, settings)
    _add_operations(app, manager, registry)
    _add_document(app, manager, settings)
    _add_routing_errors(app, metrics)
    if settings.api_keys_file is not None:
        app.add_middleware(KeyGuard, allow=ApiKeys(settings.api_keys_file).allow)
    prefixes = {COMPLETIONS: CompletionDialect.id_prefix, CHAT: ChatDialect.id_prefix}
    app.add_middleware(Envelope, metrics=metrics, id_prefixes=prefixes)
    return app


def _add_generation(app: FastAPI, answerer: Answerer) -> None:
    completion, chat = CompletionDialect(), ChatDialect()

    @app.post(COMPLETIONS)
    async def complete(request: Request) -> Response:
        return await answerer.answer(request, completion)

    @app.post(CHAT)
    async def converse(request: Request) -> Response:
        return await answerer.answer(request, chat)


def _add_models(app: FastAPI, manager: Manager, settings: GatewaySettings) -> None:
    @app.get("/v1/models")
    async def list_models() -> Response:
        card = manager.card()
        data = [_model(name, card) for name in (card.name, *settings.model_aliases)]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{model:path}")
    async def show_model(model: str) -> Response:
        card = manager.card()
        if model not in (card.name, *settings.model_aliases):
            raise HTTPException(404)
        return JSONResponse(_model(model, card))


def _add_operations(app: FastAPI, manager: Manager, registry: CollectorRegistry) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 whenever the event loop turns."""
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """200 only if a token can be produced now."""
        if not manager.is_ready():
            return error_response(Unavailable("no token can be produced now"))
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(metrics_page(registry), media_type=CONTENT_TYPE_LATEST)


def _add_document(app: FastAPI, manager: Manager, settings: GatewaySettings) -> None:
    @app.get("/openapi.json")
    async def openapi() -> Response:
        """With the model's limits as soon as they are known."""
        try:
            card = manager.card()
        except Unavailable:
            card = None
        return JSONResponse(document(card, settings.model_aliases))


def _add_routing_errors(app: FastAPI, metrics: GatewayMetrics) -> None:
    @app.exception_handler(HTTPException)
    async def tell(request: Request, error: HTTPException) -> Response:
        """404 and 405 in OpenAI's shape."""
        detail = f"{HTTPStatus(error.status_code).phrase}: {request.method} {request.url.path}"
        told = HTTPException(error.status_code, detail, dict(error.headers or {}))
        metrics.count_error(error_code(told))
        return error_response(told)


def _model(name: str, card: ModelCard) -> dict[str, object]:
    espalier = {"batch_invariant": card.batch_invariant}
    return {"id": name, "object": "model", "created": 0, "owned_by": "espalier", "espalier": espalier}

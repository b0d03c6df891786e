"""GET /v1/models and /v1/models/{id}; and the routes that are known and not served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.bodies import json_answer
from server.engine import ModelInfo
from server.errors import NotImplementedHere
from server.limits import check_model
from server.service import service_of

router = APIRouter()

NOT_SERVED = ("/v1/responses", "/v1/embeddings", "/v1/audio/speech", "/v1/images/generations")


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The served model, under each of its names."""
    info = service_of(request).ready_engine().info
    data = [_model(info, name) for name in (info.name, *info.aliases)]
    return json_answer({"object": "list", "data": data})


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> Response:
    """One name of the served model; ids with slashes work as they are."""
    info = service_of(request).ready_engine().info
    check_model(model_id, info)
    return json_answer(_model(info, model_id))


async def not_served(request: Request) -> Response:
    """501 with a plain error body."""
    raise NotImplementedHere(
        f"{request.url.path} is not served; use /v1/completions or /v1/chat/completions"
    )


for _path in NOT_SERVED:
    router.add_api_route(_path, not_served, methods=["POST"])


def _model(info: ModelInfo, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "samebits",
        "root": info.name,
        "parent": None,
        "max_model_len": info.max_model_len,
    }

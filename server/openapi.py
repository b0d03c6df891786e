"""The served OpenAPI document: bodies are read by us, so their schemas are put in here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from server.protocol import Body
from server.protocol_chat import ChatRequest
from server.protocol_completions import CompletionRequest
from server.tokenize import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_STREAMED = ("/v1/completions", "/v1/chat/completions")
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe(app: FastAPI) -> None:
    """Make `app.openapi()`, and so /openapi.json, tell the whole surface. Built once, on demand."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Error"] = _ERROR
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, model in BODIES.items():
        schemas[model.__name__] = _schema(model)
        operation = document["paths"][path]["post"]
        reference = {"$ref": f"#/components/schemas/{model.__name__}"}
        content = {"application/json": {"schema": reference}}
        operation["requestBody"] = {"required": True, "content": content}
        if path in _STREAMED:
            operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {"description": "Error", "content": error}
    return document


def _schema(model: type[Body]) -> dict[str, Any]:
    """A model's JSON schema, with null allowed wherever a field may be absent."""
    schema = model.model_json_schema()
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        if name not in required and field and field.get("type") != "null" and "anyOf" not in field:
            keep = {k: field.pop(k) for k in ("description", "title", "default") if k in field}
            schema["properties"][name] = {"anyOf": [dict(field), {"type": "null"}], **keep}
    schema["additionalProperties"] = False
    return schema

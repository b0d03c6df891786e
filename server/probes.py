"""/health, /ping, /ready, /version and /metrics: answered at any time, whatever the engine does."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from server.bodies import json_answer
from server.errors import ServerError
from server.service import Service, service_of

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.head("/ping", include_in_schema=False)
@router.get("/health")
@router.get("/ping")
async def health(request: Request) -> Response:
    """200 while the process works or loads; 503 when the engine failed to start or died."""
    service = service_of(request)
    status = _status(service)
    shown: dict[str, Any] = {"status": status, "determinism": service.settings.determinism}
    if service.engine is not None:
        found = service.engine.health()
        shown |= {
            "determinism": found.determinism,
            "device": found.device,
            "device_reason": found.device_reason,
            "running": found.num_running,
            "waiting": found.num_waiting,
        }
    if service.stalled:
        shown["reason"] = service.stalled
    return json_answer(shown, 503 if status in ("failed", "dead") else 200)


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 once the engine is verified and as long as it steps; else 503 with the reason."""
    service = service_of(request)
    try:
        engine = service.ready_engine()
        service.admission.check(0)
        if service.stalled:
            raise service.fault()
    except ServerError as fault:
        return json_answer({"ready": False, "reason": fault.message}, 503)
    return json_answer({"ready": True, "report": dict(engine.health().report)})


@router.get("/version")
async def version(request: Request) -> Response:
    """Our version, and the fingerprint once the engine is open."""
    service = service_of(request)
    engine = service.engine
    signer = service.minter.signer if service.minter else None
    return json_answer(
        {
            "version": _version(),
            "system_fingerprint": engine.fingerprint if engine else None,
            "fingerprint": dict(engine.fingerprint_tree) if engine else None,
            "receipts_public_key": signer.public_key if signer else None,
        }
    )


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text: ours, then the engine's own."""
    service = service_of(request)
    found = service.metrics
    found.in_engine.set(service.admission.in_engine)
    found.ready.set(service.engine is not None and not service.stalled)
    text = found.render()
    if service.engine is not None:
        checks = service.engine.health().report.get("checks", {})
        for op, result in checks.items():
            found.check.labels(op).set(result == "ok")
        found.fingerprint.info({"fingerprint": service.engine.fingerprint})
        text = found.render() + service.engine.metrics_text()
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def _status(service: Service) -> str:
    if service.failure is not None:
        return "failed"
    if service.engine is None:
        return "loading"
    if not service.engine.health().alive:
        return "dead"
    if service.admission.draining:
        return "draining"
    return "stalled" if service.stalled else "ok"


def _version() -> str:
    try:
        return metadata.version("samebits")
    except metadata.PackageNotFoundError:
        return "unknown"

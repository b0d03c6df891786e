"""GET /: one self-contained page. It holds no data; the browser asks the ordinary routes, with the
user's key if one is needed.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.errors import NotFound
from server.service import service_of

router = APIRouter()
# Nothing from elsewhere, no frames, no forms; scripts and styles are those of the page itself.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src "
    "'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def page(request: Request) -> Response:
    """The page, or 404 where the setting `page` is off."""
    if not service_of(request).settings.page:
        raise NotFound("there is no '/'")
    body = files("server").joinpath("page.html").read_bytes()
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(body, media_type="text/html; charset=utf-8", headers=headers)

"""API keys: default deny, proven on every registered route and on odd spellings; ids and CORS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from config.settings import Settings
from server.app import create_app
from server.middleware import OPEN_PATHS
from tests.server.fake import FakeEngine
from tests.server.live import Live, serving, strict

KEYS = "first-key, zweiter-schlüssel"


@pytest.fixture(scope="module")
def locked() -> Iterator[Live]:
    with serving(api_keys=KEYS) as live:
        yield live


async def _nothing(settings: Settings) -> FakeEngine:
    return FakeEngine()


def _routes() -> list[tuple[str, str]]:
    app = create_app(Settings(), _nothing)
    return [
        (method, getattr(route, "path", ""))
        for route in app.routes
        for method in sorted(getattr(route, "methods", None) or {"GET"})
    ]


def test_the_list_of_routes_is_no_empty_one() -> None:
    paths = {path for _, path in _routes()}
    assert {"/v1/completions", "/v1/chat/completions", "/openapi.json", "/version"} <= paths
    assert paths > OPEN_PATHS
    app = create_app(Settings(), _nothing)
    assert any(isinstance(route, APIRoute) for route in app.routes)


@pytest.mark.parametrize(("method", "path"), _routes())
def test_every_route_but_the_probes_needs_a_key(locked: Live, method: str, path: str) -> None:
    path = path.replace("{model_id:path}", "fake")
    answer = locked.http.request(method, path)
    if path in OPEN_PATHS:
        assert answer.status_code == 200
        assert path != "/" or "sb_fake" not in answer.text, "the page shows nothing by itself"
        return
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    if method != "HEAD":
        assert strict(answer.text)["error"]["code"] == "invalid_api_key"
    keyed = locked.http.request(method, path, headers={"authorization": "Bearer first-key"})
    assert keyed.status_code != 401


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "BREW"])
@pytest.mark.parametrize(
    "path",
    ["//v1/completions", "/V1/COMPLETIONS", "/v1/completions/", "/v1//completions", "/%761/models",
     "/v1/completions?x=/health", "/health/", "/Health", "//health", "/health/../v1/models",
     "/./health", "/health%2f", "/health;x", "/metrics/", "/nope", "/docs", "/v1/models/../x"],
)  # fmt: skip
def test_odd_spellings_need_a_key(locked: Live, method: str, path: str) -> None:
    import http.client

    base = locked.http.base_url
    connection = http.client.HTTPConnection(base.host, base.port)
    connection.request(method, path)  # as it stands; httpx would tidy it
    assert connection.getresponse().status == (400 if method == "BREW" else 401)
    connection.close()


@pytest.mark.parametrize(
    ("value", "passes"),
    [
        (b"Bearer first-key", True), (b"bearer first-key", True), (b"BEARER first-key", True),
        (b"Bearer  first-key", True), ("Bearer zweiter-schlüssel".encode(), True),
        (b"Bearer", False), (b"", False), (b"first-key", False),
        (b"Basic first-key", False), (b"Bearer first-key x", False), (b"Bearer first-ke", False),
        (b"Bearer first-key,zweiter", False), (b"Bearer \xff\xfe", False), (b"Token a", False),
        (b"Bearer first-key, zweiter-schl\xc3\xbcssel", False), (b"Bearerfirst-key", False),
    ],
)  # fmt: skip
def test_headers(locked: Live, value: bytes, passes: bool) -> None:
    answer = locked.http.get("/v1/models", headers=[(b"authorization", value)])
    assert answer.status_code == (200 if passes else 401)


def test_two_headers_are_none(locked: Live) -> None:
    twice = [(b"authorization", b"Bearer first-key")] * 2
    assert locked.http.get("/v1/models", headers=twice).status_code == 401


def test_behind_a_prefix() -> None:
    with serving(api_keys="k", root_path="/llm") as live:
        for path, status in (
            ("/llm/health", 200), ("/health", 200), ("/llm/v1/models", 401), ("/v1/models", 401),
            ("/llm/llm/health", 401), ("/llmhealth", 401),
        ):  # fmt: skip
            assert live.http.get(path).status_code == status, path
        keyed = {"authorization": "Bearer k"}
        assert live.http.get("/llm/v1/models", headers=keyed).status_code == 200


def test_keys_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  two  \n")
    with serving(api_keys="three", api_keys_file=str(file)) as live:
        for key in ("one", "two", "three"):
            headers = {"authorization": f"Bearer {key}"}
            assert live.http.get("/v1/models", headers=headers).status_code == 200
        assert live.http.get("/v1/models").status_code == 401


def test_no_key_at_all_stops_the_start(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n")
    for settings in (Settings(api_keys=" , "), Settings(api_keys_file=str(file))):
        with pytest.raises(ValueError, match="holds no key"):
            create_app(settings, _nothing)
    with pytest.raises(OSError, match="No such file"):
        create_app(Settings(api_keys_file=str(tmp_path / "none")), _nothing)


def test_websockets_are_closed(locked: Live) -> None:
    import http.client

    base = locked.http.base_url
    connection = http.client.HTTPConnection(base.host, base.port)
    headers = {"upgrade": "websocket", "connection": "upgrade", "sec-websocket-version": "13"}
    connection.request("GET", "/v1/completions", headers={**headers, "sec-websocket-key": "eA=="})
    assert connection.getresponse().status in (400, 401, 403)
    connection.close()


def test_cors_is_off_unless_set(live: Live) -> None:
    origin = {"origin": "http://a", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in live.http.get("/health", headers=origin).headers
    assert live.http.options("/v1/completions", headers=origin).status_code == 405
    with serving(api_keys="k", cors_origins="http://a, http://b") as open_to:
        found = open_to.http.options("/v1/completions", headers=origin)
        assert found.status_code == 200
        assert found.headers["access-control-allow-origin"] == "http://a"
        other = {**origin, "origin": "http://evil"}
        answer = open_to.http.options("/v1/completions", headers=other)
        assert "access-control-allow-origin" not in answer.headers
        assert open_to.http.post("/v1/completions", headers=origin).status_code == 401


def test_a_page_of_another_origin_can_read_why_it_was_refused() -> None:
    """Refusals are made at the edge, outside the CORS layer: without its headers a browser shows
    its page a network error instead.
    """
    with serving(api_keys="k", cors_origins="http://a", max_body_bytes=2000) as live:
        keyed = {"authorization": "Bearer k", "origin": "http://a"}
        live.engine.fault = RuntimeError("planted")
        for status, body, headers in (
            (200, {"prompt": "a"}, keyed),
            (400, {"prompt": "a", "n": 0}, keyed),
            (401, {"prompt": "a"}, {"origin": "http://a"}),
            (413, {"prompt": "a" * 3000}, keyed),
            (500, {"prompt": "a"}, keyed),
        ):
            live.engine.fail_after = 0 if status == 500 else None
            answer = live.post("/v1/completions", body, headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "http://a", status
            assert "Retry-After" in answer.headers["access-control-expose-headers"]
            other = {**headers, "origin": "http://evil"}
            answer = live.post("/v1/completions", body, headers=other)
            assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("given", "shown"),
    [(b"abc-123", True), (b"x" * 128, True), (b"x" * 129, False), (b"a b", False), (b"", False),
     ("é".encode(), False), (b"x" * 60_000, False), (b"a\tb", False)],
    ids=lambda v: str(v)[:12],
)  # fmt: skip
def test_request_ids(live: Live, given: bytes, shown: bool) -> None:
    answer = live.http.post(
        "/v1/completions",
        json={"prompt": "a", "max_tokens": 1},
        headers=[(b"x-request-id", given)],
    )
    assert answer.status_code == 200
    assert (answer.headers["x-request-id"] == given.decode("latin-1")) == shown
    assert len(answer.headers["x-request-id"]) <= 128
    assert not any(given.decode("latin-1") in i for i in live.engine.started if given)


def test_the_same_client_id_twice_at_once() -> None:
    import asyncio

    import httpx

    with serving(FakeEngine(delay_s=0.01)) as live:

        async def both() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=live.url) as client:
                calls = [
                    client.post(
                        "/v1/completions",
                        json={"prompt": "a", "seed": seed, "request_id": "same"},
                        headers={"x-request-id": "same"},
                    )
                    for seed in (1, 2)
                ]
                return list(await asyncio.gather(*calls))

        first, second = asyncio.run(both())
        alone = [live.complete(prompt="a", seed=s)["choices"][0]["text"] for s in (1, 2)]
    assert [a.json()["choices"][0]["text"] for a in (first, second)] == alone
    assert len(set(live.engine.started)) == len(live.engine.started)
    assert first.json()["id"] != second.json()["id"]

"""GET /: one file without data or outside assets; shown, and its proof run, in a real browser
where there is one.
"""

from __future__ import annotations

import contextlib
import html
import re
import shutil
import subprocess
import time
from dataclasses import replace

import httpx
import pytest

from config.settings import Settings
from server.app import create_app
from server.engine import Health
from tests.server.fake import FakeEngine
from tests.server.toy import serving

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None
)
in_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here (Debian: apt install chromium)"
)
REPORT = {
    "table": [{"op": "vllm.Attention", "kernel": "native", "tiles": {}}],
    "checks": {"vllm.Attention": "ok", "aten::mm": "row 3 differs"},
    "conditions": {"vllm.Attention": ["alone", "chunked"], "aten::mm": ["alone"]},
    "kernels": "native-avx2: compiled",
}


class Engine(FakeEngine):
    """With a report; `flaw` makes an answer depend on its neighbours."""

    flaw = False

    def health(self):
        found: Health = super().health()
        return replace(found, report=REPORT, num_running=len(self.running))

    async def generate(self, prompt, sampling, *, request_id, priority=0, whole=False):
        crowded = self.flaw and len(self.running) > 3
        changed = replace(sampling, seed=sampling.seed + 1) if crowded else sampling
        async for output in super().generate(prompt, changed, request_id=request_id):
            yield output


@contextlib.contextmanager
def page(engine=None, **settings):
    engine = engine or Engine(delay_s=0.004)

    async def opened(_):
        return engine

    with serving(create_app(Settings(**settings), opened), lifespan="on") as url:
        while httpx.get(url + "/ready").status_code != 200:
            time.sleep(0.02)
        yield url


def dom(url, folder, *flags):
    """The document as the browser has made it, after its scripts have run for a while."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    command += ["--virtual-time-budget=8000", "--timeout=20000", *flags, "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return html.unescape(done.stdout)


def test_one_file_and_nothing_from_elsewhere():
    with page() as url:
        answer = httpx.get(url + "/")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert httpx.head(url + "/").status_code == 200
        body = answer.text
    assert not re.findall(r"""(?:src|href)=["']?(?!data:)\w""", body)
    assert not re.findall(r"@import|url\((?!data:)|//cdn|innerHTML|eval\(|document\.write", body)
    assert set(re.findall(r"https?://[^\s'\"]+", body)) <= {"http://www.w3.org/2000/svg"}


def test_off_by_a_setting():
    with page(page=False) as url:
        assert httpx.get(url + "/").status_code == 404


def test_the_page_is_open_and_holds_nothing_that_needs_a_key():
    with page(api_keys="secret") as url:
        body = httpx.get(url + "/").text
        assert httpx.get(url + "/version").status_code == 401
        assert httpx.post(url + "/", content="{}").status_code in (404, 405)
    assert "secret" not in body and "fake" not in body and "sb_fake" not in body


@in_browser
def test_what_it_shows(tmp_path):
    with page() as url:
        shown = dom(url, tmp_path)
    assert 'class="state good">ok<' in shown
    assert ">sb_fake<" in shown and ">fake<" in shown and "native-avx2: compiled" in shown
    table = shown[shown.index('id="checks"') :]
    assert table.index("aten::mm") < table.index("vllm.Attention")
    assert "✗ row 3 differs" in table and ">chunked<" in table and ">in a batch<" not in table
    assert f"curl {url}/v1/completions" in shown and 'model="fake"' in shown


@in_browser
def test_the_button_shows_the_promise(tmp_path):
    engine = Engine(delay_s=0.004)
    with page(engine) as url:
        shown = dom(url + "/#prove", tmp_path)
    assert "The same: 40 tokens and 40 logprobs, every bit." in shown
    assert "15 others were answered beside it" in shown
    assert engine.peak > 8
    assert shown.count("<tr>") > 40 and '<tr class="differs">' not in shown


@in_browser
def test_the_button_shows_a_broken_promise(tmp_path):
    engine = Engine(delay_s=0.01)
    engine.flaw = True
    with page(engine) as url:
        shown = dom(url + "/#prove", tmp_path)
    assert "The promise is broken" in shown and '<tr class="differs">' in shown


@in_browser
def test_asks_for_a_key_where_one_is_needed(tmp_path):
    with page(api_keys="secret") as url:
        shown = dom(url, tmp_path)
    assert '<section id="keys">' in shown
    with page() as url:
        assert '<section id="keys" hidden="">' in dom(url, tmp_path)

"""GET /: one file without data or outside assets; shown, and its proof run, in a real browser
where there is one.
"""

from __future__ import annotations

import contextlib
import html
import re
import subprocess
import time
from dataclasses import replace

import httpx
import pytest

from config.settings import Settings
from server.app import create_app
from server.engine import Health
from tests.server.browser import BROWSER, tab
from tests.server.fake import FakeEngine
from tests.server.toy import serving

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


class Other(Engine):
    """Of another fingerprint."""

    fingerprint = "sb_other"


class Long(Engine):
    """With a report as wide as a real one."""

    def health(self):
        names = ("vllm.CpuCommunicator.reduce_scatter", "vllm.UnquantizedEmbeddingMethod")
        under = "alone,in a batch,at another place,in another order,in other memory,chunked"
        conditions = dict.fromkeys(names, [*under.split(","), "on one thread", "again"])
        checks = dict.fromkeys(names, "ok")
        return replace(super().health(), report={"checks": checks, "conditions": conditions})


@contextlib.contextmanager
def page(engine=None, at=0, **settings):
    engine = engine or Engine(delay_s=0.004)

    async def opened(_):
        return engine

    with serving(create_app(Settings(**settings), opened), lifespan="on", port=at) as url:
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


FITS = """[document.documentElement, ...document.querySelectorAll('.wide, .long, pre, dd')]
    .every((e) => e.scrollWidth <= e.clientWidth)"""
CONTRAST = """(() => {
  const light = (text) => text.match(/[0-9.]+/g).slice(0, 3).map((x) => x / 255)
    .map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => { for (; e; e = e.parentElement) {
    const found = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$/.test(found)) return found; } };
  return [...document.querySelectorAll('p, dt, dd, td, th, h1, h2, h3, button, pre, span, b')]
    .filter((e) => e.offsetParent && e.textContent && !e.disabled)
    .map((e) => [light(getComputedStyle(e).color), light(ground(e))])
    .map(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05))
    .reduce((least, x) => Math.min(least, x), 99);
})()"""
PRESSED = "document.getElementById('ask').click()"
DONE = "!document.getElementById('shown').hidden && !document.getElementById('ask').disabled"


def text(found, name):
    return found.js(f"document.getElementById('{name}').textContent")


@in_browser
def test_fits_and_is_readable_at_every_size_and_colour(tmp_path):
    with page(Long(delay_s=0.004)) as url, tab(tmp_path) as found:
        for width in (1280, 390, 320):
            for scheme in ("light", "dark"):
                found.look(url, width, scheme)
                found.until("!document.getElementById('ask').disabled")
                assert found.js(FITS), (width, scheme)
                found.js(PRESSED)
                found.until(DONE)
                assert found.js(FITS), (width, scheme, "with answers")
                assert found.js(CONTRAST) >= 4.5, (width, scheme)
                assert text(found, "running") == "0"
                assert found.js("document.querySelectorAll('#tokens tr').length") == 40


@in_browser
def test_a_key_asked_for_refused_and_taken(tmp_path):
    with page(api_keys="secret") as url, tab(tmp_path) as found:
        found.look(url, 390, "light")
        found.until("!document.getElementById('keys').hidden")
        found.until("document.getElementById('fingerprint').textContent === 'needs a key'")
        found.until("document.getElementById('curl').textContent.includes('MODEL')")
        assert found.js("document.getElementById('ask').disabled")
        for key, said in (("wrong", "The server refused this key."), ("secret", "")):
            found.js(f"document.getElementById('key').value = '{key}'")
            found.js("document.getElementById('keep').click()")
            found.until(f"document.getElementById('refused').textContent === '{said}'")
        found.until("document.getElementById('keys').hidden")
        assert "YOUR_KEY" in text(found, "curl") and "secret" not in text(found, "curl")
        found.js(PRESSED)
        found.until(DONE)
        assert text(found, "verdict").startswith("The same")


@in_browser
def test_a_server_that_goes_away_and_another_in_its_place(tmp_path):
    with tab(tmp_path) as found:
        with page(Engine(delay_s=0.05)) as url:
            found.look(url, 1280, "light")
            found.until("!document.getElementById('ask').disabled")
            found.js(PRESSED)
        found.until("document.getElementById('state').textContent === 'not reachable'")
        found.until("document.getElementById('busy').textContent.startsWith('Did not work')")
        assert "token" not in text(found, "busy")  # in words, not those of a parser
        assert found.js("document.getElementById('ask').disabled")
        assert text(found, "promise") == "…" and text(found, "running") == "–"
        with page(Other(), at=int(url.rsplit(":", 1)[1])):
            found.until("document.getElementById('fingerprint').textContent === 'sb_other'")
            found.until("!document.getElementById('ask').disabled")

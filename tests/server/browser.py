"""A real browser, headless, driven over its DevTools protocol: sizes, colour schemes, clicks."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "google-chrome", "chromium-browser")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
START_S = 30


class Tab:
    """One tab. Calls wait for their answers; events are dropped."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number = socket, 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def js(self, expression: str) -> Any:
        """The value of an expression; a promise is awaited."""
        params = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", **params)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, timeout_s: float = 30) -> None:
        """Wait until the expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.js(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.05)

    def look(self, url: str, width: int, scheme: str) -> None:
        """Open the address at this width and colour scheme."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=media)
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def shot(self, path: Path) -> None:
        """A picture of the whole page."""
        width, height = self.js("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(b64decode(answer["data"]))


@contextlib.contextmanager
def tab(folder: Path) -> Iterator[Tab]:
    """A browser of its own, ended on leaving; `folder` is its profile."""
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port_file, deadline = folder / "DevToolsActivePort", time.monotonic() + START_S
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert time.monotonic() < deadline and process.poll() is None, "no browser"
            time.sleep(0.05)
        port = port_file.read_text().split()[0]
        tabs = httpx.get(f"http://127.0.0.1:{port}/json").json()
        address = next(t["webSocketDebuggerUrl"] for t in tabs if t["type"] == "page")
        with connect(address, max_size=None) as socket:
            yield Tab(socket)
    finally:
        process.terminate()
        process.wait(20)

"""A headless Chromium, driven over its DevTools protocol: for the tests and the benchmark of the console."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
)  # fmt: skip
_PATIENCE = 60.0
KEYS = {"Escape": ("Escape", 27, ""), " ": ("Space", 32, " "), "Enter": ("Enter", 13, "\r"), "Tab": ("Tab", 9, "")}


class Browser:
    """The browser's process; :meth:`open` opens a page in a window of its own."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM, "chromium is not installed"
        self._process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port = profile / "DevToolsActivePort"
        wait(lambda: port.exists() and len(port.read_text().splitlines()) == 2)
        self._address = f"127.0.0.1:{port.read_text().splitlines()[0]}"
        self._sockets = ExitStack()

    def open(self, url: str, width: int = 1440, height: int = 900, *, mobile: bool = False) -> Tab:
        request = urllib.request.Request(f"http://{self._address}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
            address = json.load(answer)["webSocketDebuggerUrl"]
        page = Tab(self._sockets.enter_context(connect(address, max_size=None)))
        self._sockets.callback(page.call, "Page.close")
        page.resize(width, height, mobile=mobile)
        page.call("Page.navigate", url=url)
        return page

    def close_pages(self) -> None:
        self._sockets.close()

    def close(self) -> None:
        self.close_pages()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


class Tab:
    """One page."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self.errors: list[str] = []
        """Errors of the page's script, and what its policy has blocked."""
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            said = json.loads(self._socket.recv(_PATIENCE))
            if said.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(said["params"])[:400])
            elif said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.errors.append(said["params"]["entry"]["text"])
            if said.get("id") == number:
                assert "error" not in said, said
                return said["result"]

    def eval(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, patience: float = _PATIENCE) -> float:
        """Wait until an expression is true; return the seconds that it took."""
        began = time.monotonic()
        wait(
            lambda: self.eval(expression), patience, lambda: f"{expression}: {self.eval('document.body.innerText')}"
        )
        return time.monotonic() - began

    def resize(self, width: int, height: int, *, mobile: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def key(self, key: str) -> None:
        code, number, text = KEYS.get(key, (f"Key{key.upper()}", ord(key.upper()[0]), key))
        common = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def place(self, selector: str) -> tuple[float, float]:
        """Scroll an element into view; return its middle."""
        box = self.eval(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        return box[0], box[1]

    def mouse(self, kind: str, at: tuple[float, float]) -> None:
        buttons = 0 if kind == "mouseReleased" else 1
        self.call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=at[0],
            y=at[1],
            button="left" if kind != "mouseMoved" else "none",
            buttons=buttons,
            clickCount=1,
        )

    def click(self, selector: str) -> None:
        at = self.place(selector)
        self.mouse("mousePressed", at)
        self.mouse("mouseReleased", at)

    def hold(self, selector: str, seconds: float) -> None:
        at = self.place(selector)
        self.mouse("mousePressed", at)
        time.sleep(seconds)  # the act itself
        self.mouse("mouseReleased", at)

    def touch(self, selector: str, seconds: float) -> None:
        x, y = self.place(selector)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        time.sleep(seconds)
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])


def wait(ready: Callable[[], Any], patience: float = _PATIENCE, what: Callable[[], str] = lambda: "") -> None:
    """Wait until ``ready()`` is true."""
    deadline = time.monotonic() + patience
    while not ready():
        assert time.monotonic() < deadline, f"not within {patience} s {what()}"
        time.sleep(0.01)

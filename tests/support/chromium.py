"""A headless Chromium for tests and benches of HTML pages: the DevTools protocol over a pipe, and no library.

The protocol's messages are JSON with a NUL after each, on file descriptors 3 and 4 of the browser
(`--remote-debugging-pipe`), so that neither a port nor a driver of the browser's version is needed.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

from omnicomp.errors import OmnicompError

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS: Final = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-extensions", "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe"),
)
# Puts the pipes where Chromium looks for them; either may be at the other's place before.
_PIPES: Final = """
import fcntl, os, sys
first, second = (fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3])
os.dup2(first, 3)
os.dup2(second, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class BrowserError(OmnicompError):
    """The browser did not answer, or a script in the page raised."""


def find_chromium() -> str | None:
    """The path of a Chromium that is installed here, or None; the variable `CHROMIUM` names another one."""
    return os.environ.get("CHROMIUM") or next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def chromium(*, width: int = 1280, height: int = 800, timeout: float = 60.0) -> Generator["Page"]:
    """A browser with one empty page; it is ended, and its profile removed, at the end.

    Args:
        width: of the page, in pixels.
        height: likewise.
        timeout: seconds to wait for an answer.

    Raises:
        BrowserError: there is no browser, or it does not answer.
    """
    path = find_chromium()
    if path is None:
        raise BrowserError("no Chromium is installed; install Debian's package chromium, or name one in CHROMIUM")
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(prefix="omnicomp-chromium-", ignore_cleanup_errors=True) as profile:
        words = [path, *_FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", _PIPES, str(to_browser), str(from_browser), *words],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            page = Page(read, write, timeout)
            page.resize(width, height)
            yield page
        finally:
            os.close(write)
            os.close(read)
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Page:
    """The one page of the browser.

    Attributes:
        errors: exceptions, errors on the console and violations of the page's policy, as text, since `open`.
        requests: addresses that the page asked for since `open`, its own left out.
    """

    def __init__(self, read: int, write: int, timeout: float) -> None:
        self._read, self._write, self._timeout = read, write, timeout
        self._buffer = b""
        self._number = 0
        self._session = ""
        self._address = ""
        self._loaded = False
        self.errors: list[str] = []
        self.requests: list[str] = []
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol, and wait for its result.

        Raises:
            BrowserError: it failed, or there was no answer in time.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"the browser refused {method}: {answer['error'].get('message')}")
                return answer["result"]
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._read, 2**20) if ready else b""
            if not piece:
                raise BrowserError(f"the browser did not answer within {self._timeout:g} seconds, or ended")
            self._buffer += piece
        first, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(first)

    def _note(self, event: dict[str, Any]) -> None:
        method, told = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(told["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(each.get("value", "")) for each in told["args"]))
        elif method == "Network.requestWillBeSent" and told["request"]["url"] != self._address:
            self.requests.append(told["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def open(self, file: Path, fragment: str = "") -> float:
        """Open a file, wait until it is loaded and drawn, and return how long that took, in seconds."""
        self._address = file.resolve().as_uri()
        self._go("about:blank")
        self.errors, self.requests = [], []
        start = time.perf_counter()
        self._go(self._address + (f"#{fragment}" if fragment else ""))
        self.drawn()
        return time.perf_counter() - start

    def _go(self, url: str) -> None:
        if self.run("location.href") == url:
            return
        self._loaded = False
        self.send("Page.navigate", url=url)
        while not self._loaded:
            self._note(self._receive())

    def drawn(self) -> None:
        """Wait until what scripts changed is on the screen."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, as JSON knows it; a promise is waited for.

        Raises:
            BrowserError: it raised.
        """
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(f"{script!r}: {details.get('exception', {}).get('description') or details['text']}")
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """The text of the first element that a CSS selector finds."""
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def count(self, selector: str) -> int:
        """How many elements a CSS selector finds."""
        return self.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    def click(self, selector: str) -> None:
        """Click on the first element that a CSS selector finds, and wait until that is drawn."""
        self.run(f"document.querySelector({json.dumps(selector)}).click()")
        self.drawn()

    def type(self, text: str) -> None:
        """Type text where the focus is, and wait until that is drawn."""
        self.send("Input.insertText", text=text)
        self.drawn()

    def press(self, key: str) -> None:
        """Press a key, such as `ArrowDown`, `Enter`, `Tab` or `/`, and wait until that is drawn."""
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        codes |= {"End": 35, "Home": 36, "PageDown": 34, "PageUp": 33}
        told: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0]))}
        text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **told, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **told)
        self.drawn()

    def resize(self, width: int, height: int) -> None:
        """Give the page another size in pixels."""
        told = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **told)

    def prefer(self, scheme: str) -> None:
        """Let the system prefer `light` or `dark` colours."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, file: Path) -> None:
        """Write what is on the screen to a PNG file."""
        self.drawn()
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

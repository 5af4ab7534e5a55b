"""A headless Chromium, driven through the pipe of its DevTools protocol: no driver and no WebSocket is required.

Source: https://chromedevtools.github.io/devtools-protocol, and Chromium's `--remote-debugging-pipe`: it reads commands
from descriptor 3 and writes answers and events to descriptor 4, JSON ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_TIMEOUT_S = 240


class Page:
    """A tab that shows one page, and what went wrong on it."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._session, self._number = commands, answers, "", 0
        self._rest = b""
        self.errors: list[str] = []  # of the console, uncaught exceptions, and refused requests
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for area in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{area}.enable")

    def open(self, path: Path, width: int = 1400, *, dark: bool = False, scripts: bool = True) -> None:
        """Load a file at this width and theme."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[theme])
        self._call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self._call("Page.navigate", url=path.resolve().as_uri())
        self._wait("Page.loadEventFired")

    def run(self, code: str) -> Any:
        """Return the value of an expression."""
        found = self._call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def point_at(self, selector: str) -> None:
        """Move the mouse over the middle of the first element that matches."""
        element = f"document.querySelector({selector!r})"
        self.run(f"{element}.scrollIntoView({{block: 'center', inline: 'center'}})")
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # it has scrolled
        at = self.run(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({element}.getBoundingClientRect())")
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self._call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def pdf(self) -> bytes:
        found = self._call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
        return base64.b64decode(found["data"])

    def print_media(self) -> None:
        """Show the page as it would be printed."""
        self._call("Emulation.setEmulatedMedia", media="print")

    def _call(self, method: str, **params: Any) -> Any:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == number:
                assert "error" not in found, (method, found)
                return found["result"]

    def _wait(self, event: str) -> None:
        while self._read().get("method") != event:
            pass

    def _read(self) -> Any:
        until = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            assert ready, "Chromium does not answer"
            self._rest += os.read(self._answers, 1 << 20)
        text, _, self._rest = self._rest.partition(b"\0")
        found = json.loads(text)
        match found.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(found["params"]["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if found["params"]["type"] in ("error", "warning", "assert"):
                self.errors.append(str(found["params"]["args"]))
            case "Log.entryAdded" if found["params"]["entry"]["level"] in ("error", "warning"):
                self.errors.append(str(found["params"]["entry"]))
            case "Network.loadingFailed":
                self.errors.append(str(found["params"]))
            case "Network.requestWillBeSent" if not found["params"]["request"]["url"].startswith(("file:", "data:")):
                self.errors.append(found["params"]["request"]["url"])
        return found


@contextmanager
def opened(folder: Path) -> Iterator[Page]:
    """Start a Chromium with its profile in this folder, and end it."""
    assert CHROMIUM is not None
    to_chromium, from_chromium = os.pipe(), os.pipe()
    command = [
        CHROMIUM, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={folder}",
    ]  # fmt: skip

    # Descriptors 3 and 4 may be among those of the pipes: a shell moves them.
    shell = ["bash", "-c", f'exec "$@" 3<&{to_chromium[0]} 4>&{from_chromium[1]}', "bash", *command]
    process = subprocess.Popen(
        shell, pass_fds=(to_chromium[0], from_chromium[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_chromium[0])
    os.close(from_chromium[1])
    try:
        yield Page(to_chromium[1], from_chromium[0])
    finally:
        os.close(to_chromium[1])  # Chromium ends
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_chromium[0])

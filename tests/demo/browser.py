"""A headless Chromium, driven through a pipe (the DevTools protocol), for tests that look at a page."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
FLAGS += "--disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-pipe"

Json = dict[str, Any]


class Page:
    """One tab: commands are sent and answered one at a time, and requests it makes are written down."""

    def __init__(self, send: Any, receive: Any) -> None:
        self._send, self._receive, self._count, self._session = send, receive, 0, ""
        self.requests: list[str] = []
        self._seen: list[str] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.command("Page.enable")
        self.command("Network.enable")

    def command(self, method: str, **params: Any) -> Json:
        """Send a command and wait for its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._send.write(json.dumps(message).encode() + b"\0")
        self._send.flush()
        while (answer := self._read()).get("id") != self._count:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _read(self) -> Json:
        """The next message; events are taken note of."""
        raw = bytearray()
        while (byte := self._receive.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser has gone")
            raw += byte
        message: Json = json.loads(raw)
        self._seen.append(message.get("method", ""))
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message

    def open(self, path: Path) -> None:
        """Load a file, and wait until all of it is there."""
        self._seen.clear()
        self.command("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._seen:
            self._read()

    def resize(self, width: int, height: int = 800) -> None:
        """The size of the screen, in CSS pixels."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def media(self, scheme: str = "light", kind: str = "screen") -> None:
        """What the page is told about colours and medium."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", media=kind, features=features)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")


@contextmanager
def page() -> Iterator[Page]:
    """A browser with one tab, ended afterwards."""
    if EXECUTABLE is None:
        raise RuntimeError("no Chromium is installed")
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads from descriptor 3 and writes to 4.
        shell = f'exec "$0" "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
        process = subprocess.Popen(
            ["bash", "-c", shell, EXECUTABLE, *FLAGS.split(), f"--user-data-dir={profile}"],
            pass_fds=(to_browser[0], from_browser[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        with os.fdopen(to_browser[1], "wb") as send, os.fdopen(from_browser[0], "rb") as receive:
            try:
                yield Page(send, receive)
            finally:
                process.terminate()
                process.wait(timeout=20)

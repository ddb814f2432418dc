"""A real Chromium for tests, over its debugging pipe: real keys, every console message, every request."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time

import pytest

needs_browser = pytest.mark.skipif(
    os.geteuid() != 0 and shutil.which("chromium") is None, reason="no browser: apt install chromium"
)
KEYS = {
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    " ": (32, " "),
    "End": (35, ""),
    "Home": (36, ""),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
}


class Browser:
    """One process, several pages one after the other."""

    def __init__(self, folder):
        to_read, self._commands = os.pipe()
        self._answers, to_write = os.pipe()
        quiet = "--no-first-run --disable-background-networking --disable-component-update --hide-scrollbars"
        command = (
            f"exec chromium --headless --no-sandbox --disable-gpu {quiet} --remote-debugging-pipe "
            f"--user-data-dir={folder}/profile 3<&{to_read} 4>&{to_write}"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._number, self._rest, self._session = 0, b"", None
        self.events = []

    def close(self):
        os.close(self._commands)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)

    def _read(self):
        while b"\0" not in self._rest:
            found = os.read(self._answers, 1 << 20)
            assert found, "the browser has ended"
            self._rest += found
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def call(self, method, **params):
        self._number += 1
        number = self._number
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": number, "method": method, "params": params, **session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == number:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self.events.append(found)

    def open(self, path, *, width=1200, height=900, scheme="light"):
        """A new page; what it says and asks for is in `said` and `asked`."""
        self._session, self.events = None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.media(scheme=scheme)
        self.call("Page.navigate", url=path.as_uri())
        self.wait(lambda: any(event["method"] == "Page.loadEventFired" for event in self.events))

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def media(self, *, scheme, kind="screen"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=kind, features=features)

    def wait(self, condition, seconds=30.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it never came"
            self.evaluate("new Promise(resolve => setTimeout(resolve, 20))")

    def evaluate(self, expression):
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, *keys):
        for key in keys:
            code, text = KEYS[key]
            common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
            self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def shot(self, path):
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def printed(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))

    @property
    def said(self):
        spoken = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event["params"] for event in self.events if event["method"] in spoken]

    @property
    def asked(self):
        """Addresses, but for what a page makes itself."""
        urls = (e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent")
        return [url for url in urls if not url.startswith(("data:", "blob:"))]

"""Chromium without a window, driven over a pipe in the DevTools protocol: nothing to install but the browser."""

import base64
import itertools
import json
import os
import selectors
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def _find() -> str | None:
    """A browser that starts: on Ubuntu, `chromium-browser` may be a mere hint at a package."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        program = shutil.which(name)
        if program and subprocess.run([program, "--version"], capture_output=True).returncode == 0:
            return program
    return None


PROGRAM = _find()
WHY_NOT = "there is no chromium on this machine; `apt-get install chromium` brings it"
_PATIENCE = 60.0


class Browser:
    """One browser process."""

    def __init__(self, home: str) -> None:
        assert PROGRAM is not None, WHY_NOT
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe",
            f"--user-data-dir={home}",
        ]  # fmt: skip
        # The browser reads commands from its file 3 and answers on its file 4.
        redirect = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "bash", PROGRAM, *flags, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._ready = selectors.DefaultSelector()
        self._ready.register(ours_in, selectors.EVENT_READ)
        self._rest = b""
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that come meanwhile are kept."""
        number = next(self._numbers)
        command: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            command["sessionId"] = session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + _PATIENCE
        while True:
            for message in self._receive(deadline):
                if message.get("id") == number:
                    assert "error" not in message, f"{method}: {message['error']}"
                    return dict(message["result"])
                self.events.append(message)

    def wait_for(self, event: str, session: str) -> None:
        """Until an event has come."""
        deadline = time.monotonic() + _PATIENCE
        while not any(
            message.get("method") == event and message.get("sessionId") == session for message in self.events
        ):
            self.events += self._receive(deadline)

    def _receive(self, deadline: float) -> list[dict[str, Any]]:
        if not self._ready.select(max(0.0, deadline - time.monotonic())):
            raise TimeoutError("the browser does not answer")
        chunk = os.read(self._in, 1 << 20)
        if not chunk:
            raise ConnectionError(f"the browser ended with code {self._process.wait()}")
        *whole, self._rest = (self._rest + chunk).split(b"\0")
        return [json.loads(message) for message in whole]

    def close(self) -> None:
        """End the process."""
        self._ready.close()
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait(_PATIENCE)


class Tab:
    """One page, with everything it said and asked for."""

    def __init__(self, browser: Browser, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        self._browser = browser
        target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._target = target
        for room in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{room}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.ask(method, self.session, **parameters)

    def resize(self, width: int, height: int) -> None:
        """Another window, a telephone say."""
        mobile = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def open(self, address: str) -> None:
        """Load a page and wait until it is drawn."""
        self._browser.events = [event for event in self._browser.events if event.get("sessionId") != self.session]
        self.ask("Page.navigate", url=address)
        self._browser.wait_for("Page.loadEventFired", self.session)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer.get("exceptionDetails")
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 30.0) -> Any:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"never came true: {script}"
            time.sleep(0.1)
        return value

    def press(self, key: str) -> None:
        """A key."""
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def picture(self, path: Path, whole: bool = False) -> None:
        """A PNG of what is seen, or of the whole page."""
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def complaints(self) -> list[str]:
        """Errors and warnings of the page so far."""
        found = []
        for event in self._mine():
            method, about = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(about["exceptionDetails"]))
            elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
                found.append(about["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
                found.append(json.dumps(about["args"]))
        return found

    def requests(self) -> list[str]:
        """Every address it asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._mine()
            if event["method"] == "Network.requestWillBeSent"
        ]

    def _mine(self) -> list[dict[str, Any]]:
        self.run("0")  # whatever was on its way has come when this is answered
        return [event for event in self._browser.events if event.get("sessionId") == self.session]

    def close(self) -> None:
        self._browser.ask("Target.closeTarget", targetId=self._target)


@contextmanager
def started() -> Iterator[Browser]:
    """A browser with an empty profile."""
    with tempfile.TemporaryDirectory(prefix="protofed-browser-", ignore_cleanup_errors=True) as home:
        browser = Browser(home)
        try:
            yield browser
        finally:
            browser.close()

"""A page in headless Chromium that lives on: what it shows while a server changes it, and all that its console says.

Chromium's DevTools protocol over a pair of pipes: no port is opened.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.browser import CHROMIUM_S, FLAGS, PROGRAM

SIZE = (1120, 900)


class OpenPage:
    """A page that is open. `console` has what its console has said so far, as pairs of level and text."""

    def __init__(self, to: int, from_: int) -> None:
        self._to, self._from, self._buffer = to, from_, b""
        self._number, self._session = 0, ""
        self.console: list[tuple[str, str]] = []

    def attach(self) -> None:
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + CHROMIUM_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Returns the value of an expression in the page, whose policy does not hold for it."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = CHROMIUM_S) -> Any:
        """Returns the value of an expression once it is true; fails where it does not come true."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"{expression} is {value!r} after {timeout_s:g} s: {self.console}"
            time.sleep(0.1)
        return value

    def drag(self, selector: str, start: float, end: float) -> None:
        """Draws the mouse across the first such element, from one share of its width to another."""
        box = self.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
        moves = (("mouseMoved", start), ("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end))
        for kind, share in moves:
            place = {"x": box["x"] + share * box["width"], "y": box["y"] + box["height"] / 2}
            held = {"button": "left", "buttons": 1, "clickCount": 1} if kind != "mouseMoved" or share == end else {}
            self.call("Input.dispatchMouseEvent", type=kind, **place, **held)

    def photograph(self, picture: Path) -> None:
        """Writes a PNG of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        picture.write_bytes(base64.b64decode(shot["data"]))

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0], "no answer"
            data = os.read(self._from, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        event: dict[str, Any] = json.loads(message)
        said = event.get("params", {})
        if event.get("method") == "Runtime.consoleAPICalled":
            self.console.append((said["type"], " ".join(str(one.get("value")) for one in said["args"])))
        elif event.get("method") == "Runtime.exceptionThrown":
            self.console.append(("exception", json.dumps(said["exceptionDetails"])))
        elif event.get("method") == "Log.entryAdded":
            self.console.append((said["entry"]["level"], f"{said['entry']['text']} {said['entry'].get('url', '')}"))
        return event


@contextmanager
def open_page(url: str, size: tuple[int, int] = SIZE) -> Iterator[OpenPage]:
    """Opens a page in a Chromium of its own, which is ended with the block."""
    ends = [*os.pipe(), *os.pipe()]
    # above 3 and 4, which the shell gives to Chromium
    read_command, write_command, read_answer, write_answer = (
        fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends
    )
    for end in ends:
        os.close(end)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [PROGRAM, *FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"]
        # Chromium reads commands from descriptor 3 and writes answers to 4
        shell = f'exec "$@" 3<&{read_command} 4>&{write_answer}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *words, "--remote-debugging-pipe", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(read_command, write_answer),
        )
        os.close(read_command)
        os.close(write_answer)
        try:
            page = OpenPage(write_command, read_answer)
            page.attach()
            page.open(url)
            yield page
        finally:
            process.kill()
            process.wait()
            os.close(write_command)
            os.close(read_answer)

"""A headless Chromium to look at a file with: what it drew, what went wrong, what it asked for.

It is spoken to over two pipes, by the DevTools protocol: messages in JSON that end in a zero byte.
"""

import json
import os
import shutil
import subprocess
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

FOUND = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(FOUND is None, reason="no Chromium is installed")
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
]
# Chromium reads from 3 and writes to 4.
_PIPES = 'exec "$0" "$@" 3</dev/fd/{} 4>/dev/fd/{}'


@dataclass
class Seen:
    faults: list[str] = field(default_factory=list)  # errors and anything written to the console
    asked: list[str] = field(default_factory=list)  # addresses, the file's own first
    inner: int = 0  # width of the window, and of what is in it
    scrolled: int = 0
    background: str = ""
    text: str = ""  # as laid out: what is not shown is not in it


def look(file: Path, width: int = 1280, *, dark: bool = False) -> Seen:
    """Open a file in a window of this width, and see."""
    theirs, ours = os.pipe()
    back, out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        browser = [FOUND or "", *_FLAGS, f"--user-data-dir={home}"]
        process = subprocess.Popen(
            ["sh", "-c", _PIPES.format(theirs, out), *browser],
            pass_fds=(theirs, out), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs)
        os.close(out)
        limit = threading.Timer(60, process.kill)
        limit.start()
        try:
            with open(ours, "wb", buffering=0) as send, open(back, "rb") as receive:
                return _see(send, receive, file.resolve().as_uri(), width, dark)
        finally:
            limit.cancel()
            process.kill()
            process.wait()


def _see(send, receive, address: str, width: int, dark: bool) -> Seen:
    seen, session, buffer, loaded, last = Seen(), None, b"", False, 0

    def message():
        nonlocal buffer
        while b"\0" not in buffer:
            if not (part := receive.read1(1 << 16)):
                raise OSError("the browser has gone")
            buffer += part
        first, buffer = buffer.split(b"\0", 1)
        return json.loads(first)

    def note(event):
        nonlocal loaded
        what, about = event.get("method"), event.get("params", {})
        if what == "Network.requestWillBeSent":
            seen.asked.append(about["request"]["url"])
        elif what in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            seen.faults.append(json.dumps(about))
        elif what == "Log.entryAdded":
            seen.faults.append(json.dumps(about["entry"]))
        loaded = loaded or what == "Page.loadEventFired"

    def call(method, **params):
        nonlocal last
        last += 1
        own = {} if session is None else {"sessionId": session}
        send.write(json.dumps({"id": last, "method": method, "params": params, **own}).encode())
        send.write(b"\0")
        while (answer := message()).get("id") != last:
            note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def evaluate(code):
        return call("Runtime.evaluate", expression=code, awaitPromise=True)["result"].get("value")

    target = call("Target.createTarget", url="about:blank")["targetId"]
    session = call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Page", "Network", "Runtime", "Log"):
        call(f"{domain}.enable")
    call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
         mobile=False)  # fmt: skip
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    call("Emulation.setEmulatedMedia", features=[scheme])
    call("Page.navigate", url=address)
    while not loaded:
        note(message())
    evaluate("new Promise(done => setTimeout(done, 200))")  # what comes late is noted as well
    seen.inner = evaluate("innerWidth")
    seen.scrolled = evaluate("document.documentElement.scrollWidth")
    seen.background = evaluate("getComputedStyle(document.body).backgroundColor")
    seen.text = evaluate("document.body.innerText")
    return seen

"""A real browser for the tests: headless Chromium, told what to do over a pair of pipes (its DevTools protocol).

python tests/browser.py out/critic_fsdp/report.html report.png      a picture of a report's first screen
"""

import base64
import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@contextlib.contextmanager
def page(path, width=1200, height=1000):
    """Opens a file -> a function that calls a method of the protocol: call("Runtime.evaluate", expression="1 + 1")."""
    commands, replies = os.pipe(), os.pipe()
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (commands[0], replies[1])]  # not 3 or 4, which they become
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={profile}", "--hide-scrollbars", "about:blank"]
        shell = ["bash", "-c", 'exec "$@" 3<&{} 4>&{}'.format(*theirs), "bash", CHROMIUM, *flags]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(shell, pass_fds=theirs, start_new_session=True, **quiet)
        for fd in (commands[0], replies[1], *theirs):
            os.close(fd)
        session, sent = {}, iter(range(1, 10**6))
        with open(commands[1], "wb", 0) as writer, open(replies[0], "rb") as reader:

            def call(method, **params):
                number, text = next(sent), b""
                writer.write(json.dumps({"id": number, "method": method, "params": params, **session}).encode() + b"\0")
                while True:  # events come in between
                    text = b""
                    while not text.endswith(b"\0"):
                        byte = reader.read(1)
                        assert byte, f"the browser has gone in {method}"
                        text += byte
                    reply = json.loads(text[:-1])
                    if reply.get("id") == number:
                        assert "error" not in reply, (method, reply)
                        return reply["result"]

            try:
                url = pathlib.Path(path).resolve().as_uri()
                target = call("Target.createTarget", url="about:blank")["targetId"]
                session["sessionId"] = call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
                size = {"width": width, "height": height}
                call("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)
                call("Page.navigate", url=url)  # replies when the blank page is gone
                evaluate(call, "new Promise(end => document.readyState == 'complete' ? end() : onload = () => end())")
                yield call
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # its own group; asked to close it takes ten seconds
                process.wait()


def evaluate(call, expression):
    """The value of a JavaScript expression in the page; AssertionError if it throws."""
    out = call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
    assert "exceptionDetails" not in out, out["exceptionDetails"]
    return out["result"].get("value")


def hover(call, selector):
    """Moves the mouse onto the middle of the first line of an element."""
    x, y = evaluate(
        call,
        f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getClientRects()[0];"
        f" return [r.x + r.width / 2, r.y + r.height / 2] }})(document.querySelector({json.dumps(selector)}))",
    )
    call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


def screenshot(call, path, whole=False):
    """A PNG of what is seen, or of the whole page."""
    picture = call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
    pathlib.Path(path).write_bytes(base64.b64decode(picture["data"]))


if __name__ == "__main__":
    with page(sys.argv[1]) as call:
        screenshot(call, sys.argv[2], whole="--whole" in sys.argv)

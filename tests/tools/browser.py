"""A real browser for the tests: headless Chromium, driven over two pipes by its DevTools
protocol.

python tests/tools/browser.py FILE.html FILE.png X Y WIDTH HEIGHT    a picture of a part of a page
"""

import base64
import contextlib
import fcntl
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@contextlib.contextmanager
def page(path):
    """Opens a file -> call(method, **params), which calls a method of the protocol and returns its
    result."""
    commands = os.pipe()
    replies = os.pipe()
    # numbers from 10 on, because the browser's ends become 3 and 4
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (commands[0], replies[1])]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = "--headless --no-sandbox --disable-dev-shm-usage --window-size=1200,1000".split()
        chromium = [CHROMIUM, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        shell = ["bash", "-c", 'exec "$@" 3<&{} 4>&{}'.format(*theirs), "bash", *chromium]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(shell, pass_fds=theirs, start_new_session=True, **quiet)
        for fd in (commands[0], replies[1], *theirs):
            os.close(fd)
        numbers = itertools.count(1)
        session = {}
        with open(commands[1], "wb", 0) as writer, open(replies[0], "rb") as reader:

            def call(method, **params):
                message = {"id": next(numbers), "method": method, "params": params, **session}
                writer.write(json.dumps(message).encode() + b"\0")
                reply = {}
                while reply.get("id") != message["id"]:  # skip events
                    text = b""
                    while not text.endswith(b"\0"):
                        text += reader.read(1) or pytest.fail(f"the browser ended during {method}")
                    reply = json.loads(text[:-1])
                assert "error" not in reply, (method, reply)
                return reply["result"]

            try:
                target = call("Target.createTarget", url="about:blank")
                session |= call("Target.attachToTarget", **target, flatten=True)
                call("Page.navigate", url=pathlib.Path(path).resolve().as_uri())
                evaluate(
                    call, "document.readyState == 'complete' || new Promise(end => onload = end)"
                )
                yield call
            finally:
                # its own group; a clean close would take ten seconds
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def evaluate(call, expression):
    """The value of a JavaScript expression in the page; AssertionError if it throws."""
    out = call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
    assert "exceptionDetails" not in out, out["exceptionDetails"]
    return out["result"].get("value")


def set_form(call, width, scheme):
    """Shows the page as on a screen of this width. The narrow one is a phone, without a mouse."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    call("Emulation.setDeviceMetricsOverride", **size)
    call("Emulation.setTouchEmulationEnabled", enabled=width < 500)
    call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


def middle(call, selector):
    """The middle of the first line of an element, which it moves into view."""
    element = f"document.querySelector({json.dumps(selector)})"
    evaluate(call, f"{element}.scrollIntoView({{block: 'center'}})")
    box = evaluate(call, f"{element}.getClientRects()[0].toJSON()")
    return {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}


def hover(call, selector):
    """Moves the mouse onto an element."""
    call("Input.dispatchMouseEvent", type="mouseMoved", **middle(call, selector))


def tap(call, selector):
    """Taps an element with a finger, and waits for its focus, at most ten seconds."""
    point = middle(call, selector)
    call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[point])
    call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    focused = f"document.activeElement.matches({json.dumps(selector)})"
    later = "addEventListener('focusin', end), setTimeout(end, 10000)"
    evaluate(call, f"new Promise(end => {focused} ? end() : ({later}))")


def press_tab(call):
    """Presses the Tab key."""
    for kind in ("rawKeyDown", "keyUp"):
        call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)


def picture(path, file, x, y, width, height):
    """Writes a part of a page, which is 1200 pixels wide, as PNG. x, y: its upper left corner."""
    clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
    with page(path) as call:
        taken = call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
    pathlib.Path(file).write_bytes(base64.b64decode(taken["data"]))


if __name__ == "__main__":
    picture(*sys.argv[1:3], *map(float, sys.argv[3:]))

"""A real browser for tests and screenshots: Debian's Chromium, driven by Playwright; and a server of its own process."""

import contextlib
import os
import re
import shutil
import subprocess
import sys

CHROMIUM = os.environ.get("HOTLOOP_TEST_BROWSER") or shutil.which("chromium") or shutil.which("chromium-browser")


@contextlib.contextmanager
def server(root, *, port=None, environment=()):
    """Run `hotloop ui` for a folder; gives its process and the address that it prints."""
    command = [
        sys.executable,
        "-m",
        "hotloop",
        "ui",
        str(root),
        "--no-browser",
        *(["--port", str(port)] if port else ["--port", "0"]),
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root.parent,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **dict(environment)},
    )
    try:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        yield process, url
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


@contextlib.contextmanager
def browser():
    """Open a browser without a screen."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()

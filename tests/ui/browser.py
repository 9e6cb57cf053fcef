"""A real browser for tests and screenshots: Debian's Chromium, driven by Playwright; and a server of its own process."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import urllib.parse

CHROMIUM = os.environ.get("HOTLOOP_TEST_BROWSER") or shutil.which("chromium") or shutil.which("chromium-browser")
SECONDS = 180_000
"""Milliseconds, for a machine that does other things."""
STATES = {}
"""What a browser keeps of a server, by the address that opened it: each is good once."""


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
        process.wait(120)
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


@contextlib.contextmanager
def a_person(chromium, url, **context):
    """Open a page with the token, or as a browser that has used it, and hold that nothing went wrong in it: no error, no refused script, no dialog."""
    wrong = []
    usual = {"viewport": {"width": 1300, "height": 900}, "storage_state": STATES.get(url)}
    opened = chromium.new_context(**{**usual, **context})
    opened.set_default_timeout(SECONDS)
    page = opened.new_page()

    def watched(one):
        one.on("pageerror", lambda error: wrong.append(str(error)))
        one.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        one.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)

    opened.on("page", watched)
    watched(page)
    page.goto(url)
    page.wait_for_url("**/runs")
    STATES[url] = opened.storage_state()
    yield page
    opened.close()
    assert wrong == []


def at(url, path):
    return urllib.parse.urljoin(url, path)

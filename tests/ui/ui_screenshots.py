"""Make the pictures of docs/how-to/ui.md: ``python tests/ui/ui_screenshots.py``. It trains a small model for half a minute."""

import io
import re
import sys
import tempfile
import urllib.parse
from pathlib import Path

from browser import STATES, browser, server
from PIL import Image
from playwright.sync_api import expect
from small_diffusion import model, pictures

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SETTINGS = {
    "diffusion.model": str(model()), "pictures.path": str(pictures(512)), "pictures.size": "8", "pictures.step": "8", "pictures.min_size": "8", "diffusion.sample_every": "100", "diffusion.sample_steps": "4",
    "diffusion.samples": "2", "training.max_steps": "300", "training.batch_size": "16", "name": "tiny",
}  # fmt: skip
WIDE, NARROW = {"width": 1360, "height": 940}, {"width": 390, "height": 844}


def main():
    expect.set_options(timeout=180_000)
    with tempfile.TemporaryDirectory() as place, server(Path(place) / "runs") as (_, url), browser() as chromium:
        page = person(chromium, url, WIDE, "light")
        page.goto(urllib.parse.urljoin(url, "/training?recipe=diffusion"))
        page.click("#advanced > summary")
        page.click("#group-data > summary")
        for name, value in SETTINGS.items():
            page.fill(f"[name='{name}']", value)
        page.check("#mode-auto")
        expect(page.locator("#command")).to_contain_text("auto")
        page.evaluate("document.getElementById('advanced').scrollIntoView()")
        keep("ui-training.png", [taken(page)], (1020, 705))
        page.click("#start")
        expect(page.locator(".uplot").first).to_be_visible()
        expect(page.locator("#head .progress")).to_contain_text(re.compile(r"[3-9]\d%"))
        page.wait_for_timeout(4000)  # the curves come behind the head
        keep("ui-run.png", [taken(page)], (1020, 705))
        narrow(chromium, url)
        page.goto(urllib.parse.urljoin(url, "/run?run=diffusion/tiny"))
        expect(page.locator("#status")).to_have_text("finished")


def narrow(chromium, url):
    """Take the list, a run and the form on a narrow screen: by day and by night."""
    found = []
    for path, scheme in (
        ("/runs", "light"),
        ("/run?run=diffusion/tiny", "dark"),
        ("/training?recipe=diffusion", "light"),
    ):
        page = person(chromium, url, NARROW, scheme)
        page.goto(urllib.parse.urljoin(url, path))
        if path.startswith("/run?"):
            expect(page.locator(".uplot").first).to_be_visible()
        found.append(taken(page))
        page.context.close()
    keep("ui-narrow.png", found, (1020, 736))


def person(chromium, url, size, scheme):
    page = chromium.new_context(viewport=size, color_scheme=scheme, storage_state=STATES.get(url)).new_page()
    page.set_default_timeout(180_000)
    page.goto(url)
    page.wait_for_url("**/runs")
    STATES[url] = page.context.storage_state()
    return page


def taken(page):
    """Return what is in the window."""
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def keep(name, pictures, size):
    """Write pictures side by side as a small file of few colours."""
    whole = Image.new("RGB", (sum(one.width for one in pictures), pictures[0].height))
    left = 0
    for one in pictures:
        whole.paste(one, (left, 0))
        left += one.width
    file = IMAGES / name
    small = whole.resize(size, Image.Resampling.LANCZOS).quantize(
        160, Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE
    )
    small.save(file, optimize=True)
    sys.stdout.write(f"{file.name}: {file.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()

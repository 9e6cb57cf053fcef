"""Make the pictures in docs/ui.md: ``python tests/ui/ui_screenshots.py``. It trains a small model for half a minute."""

import re
import sys
import tempfile
import urllib.parse
from pathlib import Path

from browser import browser, server
from PIL import Image
from playwright.sync_api import expect

DOCS = Path(__file__).parents[2] / "docs"
SETTINGS = {
    "diffusion.width": "16", "diffusion.autoencoder_steps": "20", "diffusion.sample_every": "100", "diffusion.sample_steps": "4",
    "diffusion.samples": "2", "training.max_steps": "300", "training.batch_size": "16", "data.sample_size": "512", "name": "tiny",
}  # fmt: skip


def main():
    expect.set_options(timeout=180_000)
    with tempfile.TemporaryDirectory() as place, server(Path(place) / "runs") as (_, url), browser() as chromium:
        page = chromium.new_page(viewport={"width": 1360, "height": 940})
        page.goto(url)
        page.goto(urllib.parse.urljoin(url, "/training?recipe=diffusion"))
        page.click("#advanced > summary")
        page.click("#group-data > summary")
        for name, value in SETTINGS.items():
            page.fill(f"[name='{name}']", value)
        page.check("#mode-auto")
        expect(page.locator("#command")).to_contain_text("auto")
        page.evaluate("document.getElementById('advanced').scrollIntoView()")
        take(page, "ui-training.png")
        page.click("#start")
        expect(page.locator(".uplot").first).to_be_visible()
        expect(page.locator("#head .progress")).to_contain_text(re.compile(r"[5-9]\d%"))
        take(page, "ui-run.png")
        expect(page.locator("#status")).to_have_text("finished")


def take(page, name):
    """Write what is in the window as a small picture of few colours."""
    file = DOCS / name
    page.screenshot(path=file)
    with Image.open(file) as picture:
        small = (
            picture.convert("RGB")
            .resize((1020, 705), Image.Resampling.LANCZOS)
            .quantize(128, Image.Quantize.MAXCOVERAGE)
        )
    small.save(file, optimize=True)
    sys.stdout.write(f"{file.name}: {file.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()

"""One story in a real browser: set up, check, start, watch, stop, resume."""

import json
import os
import re
import signal

import pytest
from browser import CHROMIUM, SECONDS, a_person, server
from small_diffusion import model, pictures

from hotloop import record

pytest.importorskip("playwright", reason="the tests of the page in a browser need playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium: `make setup-browser` installs it")
from playwright.sync_api import expect  # noqa: E402

expect.set_options(timeout=SECONDS)


def tiny():
    """What a person fills in for a run of some seconds."""
    pytest.importorskip("diffusers")
    return {
        "diffusion.model": str(model()), "pictures.path": str(pictures()), "pictures.size": "8", "pictures.step": "8",
        "pictures.min_size": "8", "diffusion.sample_every": "10", "diffusion.sample_steps": "2",
        "diffusion.samples": "1", "training.max_steps": "300", "training.batch_size": "8",
        "training.num_epochs": "50", "data.sample_size": "64",
    }  # fmt: skip


@pytest.mark.campaign
def test_the_whole_story(chromium, tmp_path):  # noqa: PLR0915 - one story
    """Choose diffusion, look at what cannot run here, auto with the UNet alone, check, start, watch, stop, resume, report."""
    environment = {"HOTLOOP_CACHE_DIR": str(tmp_path / "cache"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1",
                   "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    runs = tmp_path / "runs"
    runs.mkdir()
    with server(runs, environment=environment.items()) as (process, url), a_person(chromium, url) as page:
        page.click("nav >> text=Training")
        page.select_option("#recipe", "diffusion")
        expect(page.locator("#setup")).to_have_attribute("data-draft", "diffusion")
        page.click("#advanced > summary")
        expect(page.locator("#mode-triton")).to_be_disabled()
        expect(page.locator("tr.off").first).to_contain_text("Not here: no GPU that torch can use")
        page.fill("[name='training.learning_rate']", "0,001")
        expect(page.locator("[id='note-training.learning_rate']")).to_contain_text("number")
        page.press("[name='training.learning_rate']", "Enter")
        assert "/training" in page.url  # Enter starts nothing
        page.fill("[name='training.learning_rate']", "0.001")
        page.check("#mode-auto")
        page.reload()
        expect(page.locator("#mode-auto")).to_be_checked()  # what was typed stays in the tab
        expect(page.locator("#part-unet")).to_be_checked()
        expect(page.locator("#part-text_encoder")).not_to_be_checked()
        expect(page.locator("#part-vae")).not_to_be_checked()
        page.click("#group-data > summary")
        for name, value in tiny().items():
            page.fill(f"[name='{name}']", value)
        expect(page.locator("#command")).to_contain_text("use_torch_compile=auto")
        page.click("#check")
        expect(page.locator("#checked")).to_contain_text("It can run.")
        assert list(runs.iterdir()) == []  # a check writes nothing
        page.click("#start")
        page.wait_for_url("**/run?run=diffusion*")
        expect(page.locator("#status")).to_have_text("running")
        expect(page.locator(".uplot").first).to_be_visible()
        expect(page.locator("#samples img").first).to_be_visible()
        process.send_signal(signal.SIGKILL)  # the server dies; the run does not notice
        process.wait()
        folder = next((runs / "diffusion").iterdir())
        pid = json.loads((folder / "run.lock.json").read_text())["pid"]
        os.kill(pid, 0)
        with server(runs, environment=environment.items()) as (_, again):
            page.goto(again)
            page.wait_for_url("**/runs")
            page.click("th a")
            page.click("text=Stop after this step")
            expect(page.locator("#status")).to_have_text("interrupted")
            page.click("text=Resume")
            expect(page.locator("#status")).to_have_text("finished", timeout=3 * SECONDS)
            expect(page.locator("#head")).to_contain_text(re.compile("steps.*2 sittings"))
            expect(page.locator("#components")).to_contain_text("unet")
            with page.context.expect_page() as opened:
                page.click("text=Report")
            expect(opened.value.locator("h1")).to_be_visible()
    assert record.load(folder)["status"] == "finished"

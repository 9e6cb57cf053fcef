"""The pages in a real browser: what a person sees, types and presses."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.parse

import pytest
from browser import CHROMIUM, SECONDS, a_person, at, server
from run_folders import a_cross_validation, a_run, a_study

from hotloop import record
from hotloop.record import RunRecord

pytest.importorskip("playwright", reason="the tests of the page in a browser need playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium: `make setup-browser` installs it")
from playwright.sync_api import expect  # noqa: E402

SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(2)>"
expect.set_options(timeout=SECONDS)


@pytest.mark.campaign
def test_every_page_opens_and_can_be_reached_by_its_links(person, runs):
    a_run(runs / "one")
    a_cross_validation(runs / "folds")
    a_study(runs / "search")
    person.goto(at(person.base, "/runs"))
    person.get_by_role("link", name="one", exact=True).click()
    expect(person.locator("#status")).to_have_text("finished")
    expect(person.locator(".uplot").first).to_be_visible()
    for name, said in (("folds", "What is in each fold"), ("search", "Best accuracy")):
        person.goto(at(person.base, f"/run?run={name}"))
        expect(person.get_by_text(said).first).to_be_visible()
    person.click("nav >> text=Training")
    expect(person.locator("h1")).to_have_text("Training")
    person.click("nav >> text=Machine")
    expect(person.get_by_role("heading", name="Findings")).to_be_visible()
    person.go_back()
    expect(person.locator("h1")).to_have_text("Training")


def test_a_hostile_folder_acts_nowhere(person, runs):
    name = SCRIPT.replace("/", "_")
    with RunRecord(runs / name) as written:
        written.update("settings", recipe={"name": SCRIPT})
        for step in range(1, 9):
            written.append("steps", {"step": step, "seconds": 0.1, "loss": 1.0, "running": SCRIPT})
        written.append("events", {"kind": "fallback", "step": 1, "reason": SCRIPT, "component": SCRIPT})
        written.finish("failed", SCRIPT)
    (runs / name / "ui-log.txt").write_text(SCRIPT)
    person.goto(at(person.base, "/runs"))
    person.locator("th a", has_text="alert(1)").click()  # the list may still have a run of the test before
    expect(person.locator("#status")).to_have_text("failed")
    expect(person.locator(".uplot").first).to_be_visible()
    person.hover(".plot >> nth=0")
    expect(person.locator(".callout.bad").first).to_contain_text("<script>")
    with person.context.expect_page() as opened:
        person.click("text=Report")
    expect(opened.value.locator(".uplot").first).to_be_visible()  # its own script may act, as another site
    assert opened.value.evaluate("window.origin") == "null"


def test_a_wrong_token_opens_nothing(chromium, served):
    page = chromium.new_page()
    assert page.goto(at(served[1], "/?token=wrong")).status == 401
    assert page.goto(at(served[1], "/runs")).status == 401
    page.close()


@pytest.mark.campaign
def test_a_curve_grows_while_it_is_watched_and_what_a_person_opened_stays(person, runs):
    written = RunRecord(runs / "a")
    for step in range(1, 11):
        written.append("steps", {"step": step, "seconds": 0.1, "loss": 1 / step, "running": "eager"})
    (runs / "a" / "ui-log.txt").write_text("the log\n")
    person.goto(at(person.base, "/run?run=a"))
    expect(person.locator(".uplot").first).to_be_visible()
    person.click("#environment > summary")
    opened = person.locator("#environment").get_attribute("open")
    person.evaluate("window.stillHere = true")
    for step in range(11, 31):
        written.append("steps", {"step": step, "seconds": 0.1, "loss": 1 / step, "running": "eager"})
    expect(person.locator(".plot").first).to_be_visible()
    expect(person.locator("#head")).to_contain_text("30 steps")
    assert person.evaluate("window.stillHere")
    assert person.locator("#environment").get_attribute("open") == opened
    written.append("events", {"kind": "recompiled", "step": 29, "reason": "another size", "component": "model"})
    expect(person.locator("#frames")).to_contain_text("Recompiled")
    written.finish()
    expect(person.locator("#status")).to_have_text("finished")


@pytest.mark.campaign
def test_a_reloaded_form_and_a_killed_server_lose_nothing_that_was_typed(chromium, tmp_path):
    runs = tmp_path / "runs"
    with server(runs) as (process, url), a_person(chromium, url) as page:
        port = urllib.parse.urlsplit(url).port
        page.goto(at(url, "/training"))
        usual = page.input_value("[name='training.batch_size']")
        page.click("#advanced > summary")
        page.check("#mode-auto")
        page.fill("[name='training.batch_size']", "12")
        page.reload()
        expect(page.locator("[name='training.batch_size']")).to_have_value("12")
        expect(page.locator("#mode-auto")).to_be_checked()
        expect(page.locator("#command")).to_contain_text("training.batch_size=12")
        process.kill()
        process.wait()
        with server(runs, port=port) as (_, again):
            page.goto(again)
            page.goto(at(again, "/training"))
            expect(page.locator("[name='training.batch_size']")).to_have_value("12")
            page.click("#forget")
            expect(page.locator("[name='training.batch_size']")).to_have_value(usual)


def test_mistakes_stand_beside_their_fields_as_they_are_typed(person):
    person.goto(at(person.base, "/training"))
    person.fill("[name='training.learning_rate']", "0,001")
    expect(person.locator("[id='note-training.learning_rate']")).to_contain_text("with a point")
    person.click("#check")
    expect(person.locator("#checked")).to_contain_text("mend")
    expect(person.locator("#to-mend")).to_contain_text("1 to mend")
    assert person.locator("main").inner_text().count("with a point") == 1
    person.fill("[name='training.learning_rate']", "0,01")
    expect(person.locator("#checked")).to_be_empty()
    person.fill("[name='training.learning_rate']", "0,001")
    person.press("[name='training.learning_rate']", "Enter")
    assert person.url.endswith("/training")  # Enter starts nothing
    person.click("#start")
    expect(person.locator("[name='training.learning_rate']")).to_have_value("0,001")
    expect(person.locator("[id='note-training.learning_rate']")).to_contain_text("with a point")
    person.fill("[name='training.learning_rate']", "0.001")
    expect(person.locator("#command")).to_contain_text("training.learning_rate=0.001")


def test_two_tabs_stop_a_run_once(person, runs):
    code = "import signal,sys,time\nhotloop=[]\nsignal.signal(15,lambda *_:hotloop.append(1))\nprint(flush=True)\nwhile len(hotloop)<2: time.sleep(.05)\nsys.exit(9)"
    run = subprocess.Popen([sys.executable, "-c", code, "hotloop"], stdout=subprocess.PIPE)
    try:
        assert run.stdout.readline()  # it hears signals
        a_run(runs / "a", status="running")
        told = {
            "pid": run.pid,
            "host": record.this_process()["host"],
            "process_started": record.process.started(run.pid),
        }
        (runs / "a" / "run.lock.json").write_text(json.dumps(told))
        person.goto(at(person.base, "/run?run=a"))
        other = person.context.new_page()
        other.goto(at(person.base, "/run?run=a"))
        person.click("text=Stop after this step")
        expect(person.locator("#status")).to_have_text("stopping")
        expect(other.locator("#status")).to_have_text("stopping")
        assert run.poll() is None
        other.click("text=Stop at once")
        assert run.wait(300) == 9
    finally:
        run.kill()
        run.communicate()


BROKEN = r"""
() => {
  const wrong = [], walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT), range = document.createRange();
  while (walker.nextNode()) {
    const node = walker.currentNode;
    for (const token of node.data.matchAll(/\S+/g)) {
      if (token[0].length > 24) continue;
      for (const word of token[0].matchAll(/[\p{L}\d]+/gu)) {
        range.setStart(node, token.index + word.index);
        range.setEnd(node, token.index + word.index + word[0].length);
        if (new Set([...range.getClientRects()].map((one) => Math.round(one.top))).size > 1) wrong.push(word[0]);
      }
    }
  }
  for (const cell of document.querySelectorAll("main :is(td, th)"))
    if (cell.clientWidth && cell.scrollWidth > cell.clientWidth + 1) wrong.push(`cell of ${cell.clientWidth}: ${cell.textContent.trim().slice(0, 40)}`);
  return wrong;
}
"""
"""The words that stand on two lines, and the cells that are narrower than what is in them; a long path may be broken."""


@pytest.mark.campaign
@pytest.mark.parametrize("width", [390, 1300])
def test_no_page_is_wider_than_its_window_and_no_word_is_broken(chromium, served, runs, width):
    a_run(runs / "a-run-with-a-name-that-is-longer-than-most-people-would-choose-for-their-runs" / "and-more")
    a_run(runs / "digits" / "20261125-223557", status="interrupted")
    a_run(runs / "other", goal="min:loss")
    a_study(runs / "search")
    a_cross_validation(runs / "folds")
    with a_person(chromium, served[1], viewport={"width": width, "height": 800}) as page:
        name = urllib.parse.quote(
            "a-run-with-a-name-that-is-longer-than-most-people-would-choose-for-their-runs/and-more"
        )
        compared = f"/compare?run={name}&run=other&run=digits/20261125-223557"
        of_runs = (f"/run?run={name}", "/run?run=search", "/run?run=folds", compared)
        for path in ("/runs", "/training", *of_runs, "/machine"):
            page.goto(at(served[1], path))
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
            assert page.evaluate(BROKEN) == [], path


def test_on_a_narrow_screen_what_to_press_is_in_sight_and_the_groups_are_closed(chromium, served):
    with a_person(chromium, served[1], viewport={"width": 390, "height": 844}) as page:
        page.goto(at(served[1], "/training"))
        for button in ("#check", "#start"):
            expect(page.locator(button)).to_be_in_viewport(ratio=1)
        assert page.evaluate("document.documentElement.scrollHeight") < 2000
        expect(page.locator("#name")).to_be_visible()
        expect(page.locator("[name='training.batch_size']")).to_be_hidden()
        page.click("#group-training > summary")
        page.fill("[name='training.batch_size']", "none")
        page.click("#group-training > summary")
        page.click("#to-mend >> text=Batch size")
        expect(page.locator("[name='training.batch_size']")).to_be_focused()
        expect(page.locator("[name='training.batch_size']")).to_be_in_viewport()


def test_a_recipe_that_is_chosen_is_shown_at_once(person):
    person.goto(at(person.base, "/training"))
    expect(person.locator("#recipe")).to_have_value("criteria")
    person.select_option("#recipe", "digits")
    expect(person.locator("#setup")).to_have_attribute("data-draft", "digits")
    expect(person.locator("#command")).to_contain_text("recipe=digits")
    held = []
    person.route("**/static/app.js", lambda route: held.append(route), times=1)  # noqa: PLW0108 - playwright marks it
    with person.expect_request("**/static/app.js"):
        person.goto(at(person.base, "/training"), wait_until="commit")
    person.select_option("#recipe", "focus")  # before the script is there
    held[0].continue_()
    expect(person.locator("#setup")).to_have_attribute("data-draft", "focus")
    person.goto(at(person.base, "/training?program=train.py"))  # no program: the recipes are offered again
    person.select_option("#recipe", "digits")
    expect(person.locator("#setup")).to_have_attribute("data-draft", "digits")


@pytest.mark.campaign
def test_the_form_is_reached_by_the_keyboard_and_each_field_has_its_label(person):
    person.goto(at(person.base, "/training"))
    nameless = person.evaluate(
        """() => [...document.querySelectorAll("input:not([type=hidden]), select, button, textarea")]
        .filter((one) => !one.hidden && !(one.labels && one.labels.length) && !one.getAttribute("aria-label") && !one.textContent.trim())
        .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    person.keyboard.press("Tab")
    assert person.evaluate("document.activeElement.textContent") == "Skip to the page"
    ids = person.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))


TINY = {
    "diffusion.width": "16", "diffusion.autoencoder_steps": "10", "diffusion.sample_every": "10", "diffusion.sample_steps": "2",
    "diffusion.samples": "1", "training.max_steps": "300", "training.batch_size": "8", "data.sample_size": "64",
}  # fmt: skip


@pytest.mark.campaign
def test_the_whole_story(chromium, tmp_path):
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
        page.check("#mode-auto")
        expect(page.locator("#part-unet")).to_be_checked()
        expect(page.locator("#part-text_encoder")).not_to_be_checked()
        expect(page.locator("#part-vae")).not_to_be_checked()
        page.click("#group-data > summary")
        for name, value in TINY.items():
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

"""What a person does beside starting a run, in a real browser: the queue, presets, requests to a run, bundles."""

import json
import re

import pytest
import torch
from browser import CHROMIUM, SECONDS, a_person, at, server
from run_folders import training
from safetensors.torch import load_file

from hotloop import record
from hotloop.train import checkpoint, configure, requests
from hotloop.train.requests import Requests

pytest.importorskip("playwright", reason="the tests of the page in a browser need playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium: `make setup-browser` installs it")
from playwright.sync_api import expect  # noqa: E402

expect.set_options(timeout=SECONDS)


@pytest.mark.campaign
def test_a_run_is_queued_behind_the_one_that_trains_and_taken_out_again(person, runs):
    with training(runs / "busy"):
        for name in ("first", "second"):
            person.goto(at(person.base, "/training?recipe=digits"))
            person.fill("#name", name)
            expect(person.locator("#command")).to_contain_text(name)
            person.click("#queue")
            person.wait_for_url("**/runs")
        person.goto(at(person.base, "/training?recipe=digits"))
        expect(person.locator("#name")).to_have_value("second-2")  # the next run needs a name of its own
        person.goto(at(person.base, "/runs"))
        other = person.context.new_page()
        other.goto(at(person.base, "/runs"))
        expect(other.locator("#queue tr")).to_have_count(2)
        person.get_by_role("button", name="Remove digits/first from the queue").click()
        expect(person.locator("#queue tr")).to_have_count(1)
        expect(other.locator("#queue tr")).to_have_count(1)  # the other tab hears of it
        expect(other.locator("#queue")).to_contain_text("digits/second")
        person.get_by_role("button", name="Remove digits/second from the queue").click()
        expect(person.locator("#queue")).to_be_empty()


@pytest.mark.campaign
def test_settings_are_kept_by_name_loaded_and_compared(person, runs):
    size, saved = "[name='training.batch_size']", "#presets .callout"
    person.goto(at(person.base, "/training?recipe=digits"))
    person.fill(size, "8")
    person.click("#presets-part > summary")
    person.fill("#preset-name", "small")
    person.press("#preset-name", "Enter")  # which starts nothing
    assert "/training" in person.url
    person.click("#preset-save")
    expect(person.locator(saved)).to_have_text("Saved as small.")
    person.fill(size, "16")
    person.fill("#preset-name", "small")
    person.click("#preset-save")
    expect(person.locator(saved)).to_contain_text("is there already")
    expect(person.locator("#preset-name")).to_have_value("small")
    person.click("#preset-keep")
    person.click("#preset-diff")
    expect(person.locator("#preset-differ td")).to_have_text(["", "8", "16"])
    person.click("#preset-load")
    expect(person.locator(size)).to_have_value("8")
    expect(person.locator("#command")).to_contain_text("training.batch_size=8")
    person.click("#bring-back")  # what stood in the form before
    expect(person.locator(size)).to_have_value("16")
    person.goto(at(person.base, "/training?preset=small"))
    expect(person.locator(size)).to_have_value("8")
    person.fill(size, "32")
    person.reload()
    expect(person.locator(size)).to_have_value("32")  # and not the preset's again
    person.click("#presets-part > summary")
    person.click("#preset-delete")
    person.click("#preset-sure")
    expect(person.locator("#preset")).to_have_count(0)


@pytest.mark.campaign
def test_a_run_is_asked_to_save_and_its_weights_are_exported(person, runs):
    with training(runs / "a"):
        asked = Requests(runs / "a")
        checkpoint.save(
            runs / "a" / "checkpoints" / "last.pt",
            {
                "model": {"model": {"w": torch.ones(2)}},
                "others": {},
                "position": {"step": 3},
                "settings": configure.to_dict(configure.load(["recipe=digits"])),
            },
        )
        person.goto(at(person.base, "/run?run=a"))
        expect(person.locator("#usage")).to_contain_text("The process holds")
        person.click("text=Save now")
        expect(person.locator("#actions")).to_contain_text("Save now: after this step")
        assert requests.is_asked(runs / "a")
        assert asked.asked()
        expect(person.get_by_role("button", name="Save now")).to_be_visible()  # the page hears that it was answered
    person.goto(at(person.base, "/run?run=a"))
    expect(person.locator(".uplot").first).to_be_visible()  # charts that come under a press move what is pressed
    person.click("#checkpoints > summary")
    person.click("text=Export last")
    person.wait_for_url("**#exported")
    with person.expect_download() as got:
        person.click("text=export-last/model.safetensors")
    assert load_file(got.value.path())["w"].tolist() == [1.0, 1.0]


@pytest.mark.campaign
def test_a_bundle_is_imported_once_a_person_agreed_and_what_is_wrong_with_it_is_said(person, tmp_path):
    (tmp_path / "bundle.zip").write_text("no bundle")
    person.goto(at(person.base, "/machine"))
    person.fill("#bundle", str(tmp_path / "bundle.zip"))
    person.press("#bundle", "Enter")
    expect(person.locator("#bundles .callout")).to_contain_text("A compile cache is code")
    assert person.url.endswith("/machine")
    person.click("#bundle-sure")
    expect(person.locator("#bundles .callout")).to_contain_text("bundle.zip")
    expect(person.locator("#bundles .callout")).not_to_contain_text("A compile cache is code")
    expect(person.locator("#bundle")).to_have_value(str(tmp_path / "bundle.zip"))


@pytest.mark.campaign
def test_a_killed_server_loses_no_queue_and_a_failed_run_does_not_stop_it(chromium, tmp_path):
    environment = {"HOTLOOP_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    runs = tmp_path / "runs"
    with server(runs, environment=environment.items()) as (process, url), a_person(chromium, url) as page:
        for name, rate in (("bad", "1e30"), ("good", "0.001")):
            page.goto(at(url, "/training?recipe=digits"))
            page.fill("#name", name)
            page.fill("[name='training.learning_rate']", rate)
            page.fill("[name='training.num_epochs']", "1")
            page.click("#queue")
            page.wait_for_url("**/runs")
        process.kill()
        process.wait()
    with server(runs, environment=environment.items()) as (_, url), a_person(chromium, url) as page:
        with server(runs, environment=environment.items()):  # a second one
            expect(page.locator("tr", has_text="digits/good").locator(".pill")).to_have_text(
                "finished", timeout=3 * SECONDS
            )
        expect(page.locator("tr", has_text="digits/bad").locator(".pill")).to_have_text("failed")
        expect(page.locator("#queue")).to_be_empty()
    bad, good = (record.load(runs / "digits" / name) for name in ("bad", "good"))
    assert good["starts"] == bad["starts"] == 1
    assert good["created"] >= bad["finished"]


@pytest.mark.campaign
def test_a_search_that_was_stopped_is_resumed_from_its_page(chromium, tmp_path):
    environment = {"HOTLOOP_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with server(tmp_path / "runs", environment=environment.items()) as (_, url), a_person(chromium, url) as page:
        page.goto(at(url, "/training?recipe=digits"))
        page.select_option("#verb", "hpo")
        page.fill("#name", "search")
        page.click("#advanced > summary")
        page.click("#group-hpo > summary")
        page.fill("[name='hpo.n_trials']", "8")
        page.fill("[name='training.num_epochs']", "1")
        expect(page.locator("#command")).to_contain_text("hpo.n_trials=8")
        page.click("#start")
        expect(page.locator("#head")).to_contain_text(re.compile("[1-7] complete"), timeout=3 * SECONDS)
        page.click("text=Stop after this step")
        expect(page.locator("#status")).to_have_text("open", timeout=3 * SECONDS)
        page.click("text=Resume")
        expect(page.locator("#status")).to_have_text("finished", timeout=3 * SECONDS)
    found = json.loads((tmp_path / "runs" / "digits" / "search" / "study.json").read_text())
    assert sorted(one["number"] for one in found["trials"] if one["state"] == "complete") == list(range(8))

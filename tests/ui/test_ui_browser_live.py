"""What a person sees while something takes its time, and of what changes while they watch, in a real browser."""

import json
import urllib.parse

import pytest
from browser import CHROMIUM, SECONDS, a_person, at, server
from run_folders import a_run, a_study

from hotloop.record import RunRecord

pytest.importorskip("playwright", reason="the tests of the page in a browser need playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium: `make setup-browser` installs it")
from playwright.sync_api import expect  # noqa: E402

expect.set_options(timeout=SECONDS)


def hold(page, address):
    """Keep the answers to an address back until the test gives them."""
    held = []
    page.route(address, lambda route: held.append(route))  # noqa: PLW0108 - playwright marks it
    return held


@pytest.mark.campaign
def test_a_check_that_takes_long_says_so_is_asked_once_and_leaves_the_keyboard_where_it_was(person, runs):
    person.goto(at(person.base, "/training?recipe=digits"))
    held = hold(person, "**/training/check")
    person.focus("#check")
    person.keyboard.press("Enter")
    expect(person.get_by_role("status").filter(has_text="Nothing is trained")).to_be_visible()
    expect(person.locator("#check")).to_have_attribute("aria-busy", "true")
    person.keyboard.press("Enter")
    assert person.evaluate("document.activeElement.id") == "check"
    held[0].fulfill(body="<p>It can run.</p>", content_type="text/html")
    expect(person.locator("#checked")).to_have_text("It can run.")
    expect(person.locator("#at-work")).to_be_empty()
    expect(person.locator("#check")).not_to_have_attribute("aria-busy", "true")
    assert len(held) == 1
    assert person.evaluate("document.activeElement.id") == "check"


COUNT = "addEventListener('submit', (event) => { window.sent = (window.sent || 0) + !event.defaultPrevented; event.preventDefault(); })"


@pytest.mark.parametrize("button", ["#start", "#queue"])
def test_what_is_pressed_twice_starts_one_run(person, button):
    person.goto(at(person.base, "/training?recipe=digits"))
    person.evaluate(COUNT)  # and let no form go
    person.click(button)
    expect(person.locator("#at-work")).to_contain_text("The settings are checked first")
    expect(person.locator(button)).to_have_attribute("aria-busy", "true")
    person.click(button)
    assert person.evaluate("window.sent") == 1
    person.evaluate("dispatchEvent(new PageTransitionEvent('pageshow'))")  # a person went back to it
    expect(person.locator("#at-work")).to_be_empty()
    expect(person.locator(button)).not_to_have_attribute("aria-busy", "true")
    person.click(button)
    assert person.evaluate("window.sent") == 2


@pytest.mark.campaign
def test_a_page_says_that_its_server_is_gone_and_that_another_took_its_place(chromium, tmp_path):
    runs = tmp_path / "runs"
    a_run(runs / "a")
    with server(runs) as (process, url), a_person(chromium, url) as page:
        page.goto(at(url, "/run?run=a"))
        training = page.context.new_page()
        training.goto(at(url, "/training?recipe=digits"))
        process.kill()
        process.wait()
        expect(page.get_by_role("alert").filter(has_text="the server does not answer")).to_be_visible()
        with server(runs, port=urllib.parse.urlsplit(url).port):
            training.fill("#name", "kept")
            expect(training.locator("#not-live")).to_contain_text("of an earlier server")
            expect(training.locator("#name")).to_have_value("kept")


@pytest.mark.campaign
def test_runs_that_are_compared_are_followed(person, runs):
    written = {name: RunRecord(runs / name) for name in ("a", "b")}
    for name, one in written.items():
        one.append("steps", {"step": 1, "seconds": 1.0, "loss": 1.0, "running": "eager", "name": name})
    person.goto(at(person.base, "/compare?run=a&run=b"))
    steps = person.locator("tr", has=person.get_by_role("rowheader", name="Steps", exact=True)).locator("td")
    expect(steps).to_have_text(["1", "1"])
    expect(person.locator(".uplot")).to_have_count(2)
    for number in range(2, 6):
        written["b"].append("steps", {"step": number, "seconds": 1.0, "loss": 1 / number, "running": "eager"})
    expect(steps).to_have_text(["1", "5"])
    for one in written.values():
        one.append("metrics", {"step": 5, "split": "validation", "accuracy": 0.5})
    expect(person.locator(".uplot")).to_have_count(3)  # a curve that was not there
    for one in written.values():
        one.finish()


@pytest.mark.campaign
def test_the_legend_counts_what_happens(person, runs):
    written = RunRecord(runs / "a")
    for step in range(1, 20):
        written.append("steps", {"step": step, "seconds": 0.1, "loss": 1.0, "running": "full"})
    written.append("events", {"kind": "recompiled", "step": 5, "reason": "a size", "component": "model"})
    person.goto(at(person.base, "/run?run=a"))
    expect(person.locator(".kind", has_text="Recompiled").first).to_contain_text("Recompiled 1")
    written.append("events", {"kind": "recompiled", "step": 9, "reason": "a size", "component": "model"})
    expect(person.locator(".kind", has_text="Recompiled").first).to_contain_text("Recompiled 2")
    written.finish()


@pytest.mark.campaign
def test_a_search_is_followed_without_losing_what_was_typed(person, runs):
    folder = runs / "search"
    folder.mkdir()
    (folder / "study.yaml").write_text("recipe: {name: digits}\n")
    person.goto(at(person.base, "/run?run=search"))
    a_study(runs / ".other")
    found = json.loads((runs / ".other" / "study.json").read_text())
    space = {"program.lr": {"kind": "log", "values": [1e-4, 1.0], "step": None, "when": None}}

    def write(many):
        trials = [
            {**found["trials"][0], "number": one, "values": {"program.lr": 0.1 / (1 + one)}} for one in range(many)
        ]
        part = folder / "part"
        part.write_text(json.dumps({**found, "space": space, "trials": trials}))
        part.rename(folder / "study.json")

    write(9)
    expect(person.locator("#trials h2")).to_contain_text("9")
    person.fill("[data-filter=trials]", "complete")
    person.evaluate("window.stillHere = true")
    write(12)
    expect(person.locator("#trials h2")).to_contain_text("12")
    expect(person.locator("[data-filter=trials]")).to_have_value("complete")
    expect(person.locator(".uplot").first).to_be_visible()
    a_run(folder / "trials" / "11", status="running")
    expect(person.locator("#members")).to_contain_text("search/trials/11")
    assert person.evaluate("window.stillHere")

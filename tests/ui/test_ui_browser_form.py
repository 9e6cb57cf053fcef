"""The form of settings in a real browser: what nothing reads is grey and stays, and the ranges of a search are rows."""

import pytest
from browser import CHROMIUM, SECONDS, at

pytest.importorskip("playwright", reason="the tests of the page in a browser need playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium: `make setup-browser` installs it")
from playwright.sync_api import expect  # noqa: E402

expect.set_options(timeout=SECONDS)


def open_form(person, *groups):
    person.goto(at(person.base, "/training?recipe=digits"))
    for group in ("advanced", *groups):
        person.click(f"#{group} > summary")


@pytest.mark.campaign
def test_what_the_mode_does_not_read_is_reached_by_the_keyboard_and_not_changed(person):
    open_form(person)
    regions, options = person.locator("[id='f-compile.regions']"), person.locator("[id='f-compile.options']")
    person.check("#mode-default")
    expect(regions).not_to_have_attribute("aria-disabled", "true")
    regions.select_option("whole")
    options.fill("{shape_padding: true}")
    expect(person.locator("#command")).to_contain_text("compile.regions=whole")
    person.check("#mode-none")
    expect(regions).to_have_attribute("aria-disabled", "true")
    expect(person.locator("#part-model")).to_have_attribute("aria-disabled", "true")
    expect(person.locator("[id='note-compile.regions']")).to_contain_text("not used with NONE")
    regions.focus()
    person.keyboard.press("ArrowDown")
    person.keyboard.press("b")
    expect(regions).to_have_value("whole")
    person.keyboard.press("Tab")
    expect(person.locator("[id='f-compile.dynamic']")).to_be_focused()  # it is no trap
    options.focus()
    person.keyboard.type("x")
    expect(options).to_have_value("{shape_padding: true}")
    person.locator("#part-model").click(force=True)
    person.locator("label[for='part-model']").click(force=True)
    expect(person.locator("#part-model")).to_be_checked()
    person.reload()
    expect(regions).to_have_value("whole")  # it counts again in another mode
    expect(regions).to_have_attribute("aria-disabled", "true")
    person.click("#advanced > summary")
    person.check("#mode-aot_eager")
    expect(options).to_be_editable()
    expect(person.locator("#command")).to_contain_text("compile.options={shape_padding:true}")


@pytest.mark.campaign
def test_ranges_are_added_taken_out_and_brought_back(person):
    open_form(person)
    person.select_option("#verb", "hpo")
    person.click("#group-hpo > summary")
    usual = person.locator("[data-range]").count()
    new = f"range-{usual}"
    person.click("#range-add")
    expect(person.locator(f"#{new}-setting")).to_be_focused()
    person.select_option(f"#{new}-setting", "digits.hidden_size")
    person.fill(f"#{new}-low", "0,5")
    person.fill(f"#{new}-high", "64")
    expect(person.locator(f"[id='note-range.{usual}']")).to_contain_text("write numbers with a point")
    expect(person.locator("#to-mend")).to_contain_text("Range of hidden size")
    person.fill(f"#{new}-low", "16")
    expect(person.locator("#command")).to_contain_text("hidden_size:{int:[16,64]}")
    person.click("[data-drop='0']")
    expect(person.locator("[data-drop='1']")).to_be_focused()
    expect(person.locator("#command")).to_contain_text("learning_rate:null")
    person.reload()
    expect(person.locator(f"#{new}-low")).to_have_value("16")
    expect(person.locator("#range-0-setting")).to_have_count(0)
    expect(person.locator("#command")).to_contain_text("hidden_size:{int:[16,64]}")
    expect(person.locator("#command")).to_contain_text("learning_rate:null")
    person.click("#advanced > summary")
    person.click("#group-hpo > summary")
    person.select_option(f"#{new}-kind", "choices")
    expect(person.locator(f"#{new}-low")).to_be_hidden()
    person.fill(f"#{new}-choices", "16, 32")
    expect(person.locator("#command")).to_contain_text("hidden_size:{choices:[16,32]}")
    person.select_option("#verb", "kfold")
    expect(person.locator("#range-add")).to_have_attribute("aria-disabled", "true")
    person.click("#range-add", force=True)
    expect(person.locator("[data-range]")).to_have_count(usual)
    person.click("#forget")
    expect(person.locator("#range-0-setting")).to_have_value("training.learning_rate")


@pytest.mark.campaign
def test_a_refused_form_comes_back_with_its_ranges(person):
    open_form(person)
    person.select_option("#verb", "hpo")
    person.click("#group-hpo > summary")
    person.fill("#range-0-low", "0,1")
    expect(person.locator("[id='note-range.0']")).to_contain_text("write numbers with a point")
    person.click("#start")
    expect(person.locator("#setup")).to_have_attribute("data-sent", "typed")
    expect(person.locator("#range-0-low")).to_have_value("0,1")
    person.click("#to-mend a")
    expect(person.locator("#range-0-setting")).to_be_focused()


@pytest.mark.campaign
def test_a_link_to_a_field_works_while_it_is_pressed_slowly_or_before_the_scripts_came(person):
    open_form(person)
    person.select_option("#verb", "hpo")
    person.click("#group-hpo > summary")
    person.fill("#range-0-low", "0,1")
    expect(person.locator("[id='note-range.0']")).to_contain_text("write numbers with a point")
    with person.expect_response("**/training/preview"):  # what is the same then stays under the person's finger
        person.click("#start")
        expect(person.locator("#setup")).to_have_attribute("data-sent", "typed")  # and no more the page before
        person.click("#to-mend a", delay=2000)
    expect(person.locator("#range-0-setting")).to_be_focused()
    waiting = []
    person.route("**/app*.js*", lambda one: waiting.append(one))  # noqa: PLW0108 (playwright sets attributes on it)
    with person.expect_request("**/app*.js*"):  # of the next page
        person.click("#start", no_wait_after=True)
    person.click("#to-mend a", no_wait_after=True)
    assert waiting
    for one in waiting:
        one.continue_()
    expect(person.locator("#range-0-setting")).to_be_focused()

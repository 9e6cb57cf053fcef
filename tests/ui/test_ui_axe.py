"""Every page judged by axe-core, in both colour schemes, wide and narrow, with all its parts open."""

import json
import urllib.parse
from importlib import resources

import pytest
from browser import CHROMIUM, SECONDS, a_person, at, server
from PIL import Image
from report_documents import whole_run
from run_folders import a_cross_validation, a_run, a_study, training

from hotloop import record
from hotloop.record import RunRecord

pytest.importorskip("playwright", reason="the tests of the page in a browser need playwright")
pytest.importorskip("axe_playwright_python", reason="axe-core comes with axe-playwright-python")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium: `make setup-browser` installs it")
from playwright.sync_api import expect  # noqa: E402

expect.set_options(timeout=SECONDS)
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(2)>"
"""A person in `a_person` sees no dialog: what a folder says acts nowhere."""
AXE = (resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
JUDGE = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations.map((one) =>
    [one.id, one.impact, one.nodes.map((node) => node.html.slice(0, 200) + " :: " + node.failureSummary)])"""


def judge(page, said):
    """Hold that axe finds nothing on a page as it is now, with every part of it open."""
    expect(page.locator("#preview.htmx-request")).to_have_count(0)  # which is pale
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.evaluate(AXE)
    found = page.evaluate(JUDGE)
    assert not found, f"{said}: {json.dumps(found, indent=1)}"


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A folder with a run of everything that a page shows, and its server."""
    runs = tmp_path_factory.mktemp("judged") / "runs"
    whole = runs / "whole"
    for place in ("samples", "checkpoints"):
        (whole / place).mkdir(parents=True)
    (whole / record.DOCUMENT).write_text(json.dumps(whole_run()))
    (whole / "settings.yaml").write_text("recipe: {name: criteria}\n")
    (whole / "ui-log.txt").write_text("epoch 1\nepoch 2\n")
    (whole / "ui-start.json").write_text(json.dumps({"pid": 1, "arguments": ["train", "recipe=criteria"]}))
    (whole / "checkpoints" / "best.pt").write_bytes(b"weights")
    Image.new("RGB", (64, 64)).save(whole / "samples" / "step-000010.png")
    a_run(runs / "interrupted", status="interrupted")
    a_run(runs / "failed", status="failed")
    a_study(runs / "search")
    a_run(runs / "search" / "trials" / "0")
    a_cross_validation(runs / "folds")
    with RunRecord(runs / SCRIPT.replace("/", "_")) as written:
        written.append("steps", {"step": 1, "seconds": 0.1, "loss": 1.0, "running": SCRIPT})
        written.finish("failed", SCRIPT)
    with server(runs) as (_, url), training(runs / "busy"):
        yield runs, url


def forms(page, url):
    """Yield the page of training as it opens, and with a mistake in it."""
    page.goto(at(url, "/training?recipe=diffusion"))
    judge(page, "training")
    page.fill("[name='training.batch_size']", "none")
    expect(page.locator("#to-mend")).to_contain_text("1 to mend")
    judge(page, "training with a mistake")
    page.fill("[name='training.batch_size']", "8")
    expect(page.locator("#command")).to_contain_text("batch_size=8")


PLAIN = (
    "/runs", "/runs?find=nothing", f"/run?run={urllib.parse.quote(SCRIPT.replace('/', '_'))}", "/run?run=whole", "/run?run=interrupted", "/run?run=failed", "/run?run=search", "/run?run=folds",
    "/compare?run=whole&run=interrupted&run=failed", "/compare?run=whole", "/run?run=nothing", "/training?program=nothing.py:make", f"/training?program={__file__}:make",
)  # fmt: skip


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (390, "dark"),
        (1300, "light"),
        pytest.param(390, "light", marks=pytest.mark.long),
        pytest.param(1300, "dark", marks=pytest.mark.long),
    ],
)
def test_axe_finds_nothing_on_any_page(chromium, full, scheme, width):
    _, url = full
    with a_person(
        chromium, url, viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True
    ) as page:
        for path in PLAIN:
            page.goto(at(url, path))
            if path.startswith(("/run?run=whole", "/compare?run=whole&")):
                expect(page.locator(".uplot").first).to_be_visible()
            judge(page, path)
        page.goto(at(url, "/run?run=busy"))
        expect(page.get_by_role("button", name="Save now")).to_be_visible()
        judge(page, "a run that trains")
        page.goto(at(url, "/run?run=whole"))
        expect(page.locator(".uplot").first).to_be_visible()  # charts that come under a press move what is pressed
        page.click("#checkpoints > summary")
        page.select_option("#format-best", "pretrained")
        page.click("#act-run-export-best")
        expect(page.locator("h1")).to_contain_text("as pretrained?")
        judge(page, "an export that runs a program")
        page.goto(at(url, f"/run?run={urllib.parse.quote('whole')}"))
        page.click("#act-run-delete")
        expect(page.locator("h1")).to_contain_text("Delete whole?")
        judge(page, "a run that would be deleted")
        forms(page, url)
        page.goto(at(url, "/machine"))
        expect(page.get_by_role("heading", name="Versions")).to_be_visible()
        judge(page, "machine")


@pytest.mark.campaign
def test_what_axe_finds_fails_a_test(chromium):
    page = chromium.new_page()
    page.set_content("<html lang=en><title>a</title><main><h1>a</h1><input></main>")
    with pytest.raises(AssertionError, match="label"):
        judge(page, "a field without a label")
    page.close()

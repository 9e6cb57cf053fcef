import base64
import hashlib
import html.parser
import json
import re
from pathlib import Path

import pytest
from report_documents import FILE, HOSTILE

from hotloop.report import build, page, write_html

VOID = {"meta", "link", "path", "circle", "input", "br"}
SECTIONS = (
    "charts",
    "told",
    "components",
    "decisions",
    "verdicts",
    "events",
    "metrics",
    "measurements",
    "settings",
    "environment",
    "data",
)


class Parsed(html.parser.HTMLParser):
    """The elements of a page, the text of each script and style, and all text outside of them."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.raw, self.shown = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag in {"script", "style"}:
            self.raw.append((tag, dict(attrs), []))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in {"script", "style"}:
            self.raw[-1][2].append(data)
        else:
            self.shown.append(data)

    def text_of(self, tag, **attributes):
        found = ["".join(text) for name, attrs, text in self.raw if name == tag and attributes.items() <= attrs.items()]
        assert len(found) == 1
        return found[0]


@pytest.fixture(params=["document", "empty", "hostile"])
def any_page(request, tmp_path):
    return write_html(request.getfixturevalue(request.param), tmp_path / "report.html").read_text(encoding="utf-8")


def test_every_section_is_there(document, tmp_path):
    parsed = Parsed(write_html(document, tmp_path / "a.html").read_text(encoding="utf-8"))
    ids = [attrs["id"] for _, attrs in parsed.elements if "id" in attrs]
    assert set(SECTIONS) <= set(ids)
    assert len(ids) == len(set(ids))
    shown = " ".join(" ".join(parsed.shown).split())
    for said in ("criteria", "finished", f"{FILE}:71", "x = y.cpu()", "log after the step", "NVIDIA H200", "training.batch_size",
                 "pays from step 40 on", "3 GiB", "Best F1", "use torch.where",
                 "36 pairs in 9 groups left out 1 pair of p.csv: line 3: no label"):  # fmt: skip
        assert said in shown


def test_the_page_is_well_formed_and_asks_nothing_of_others(any_page):
    parsed = Parsed(any_page)
    assert not parsed.open
    for tag, attrs in parsed.elements:
        assert tag not in {"iframe", "object", "embed", "base", "form", "img"}
        for name, value in attrs.items():
            assert not name.startswith("on"), (tag, name)
            assert name != "style"
            if name in {"src", "href", "action", "srcset"}:
                assert value == "data:,"
    style = parsed.text_of("style")
    assert "url(" not in style
    assert "@import" not in style
    code = [text for tag, attrs, parts in parsed.raw if tag == "script" and not attrs for text in parts]
    assert re.findall(r"https?://[^\s)]+", "".join(code)) == ["https://github.com/leeoniya/uPlot"]
    for wanted in ("fetch(", "XMLHttpRequest", "innerHTML", "eval(", "WebSocket", "import("):
        assert wanted not in Path(page.__file__).with_name("assets").joinpath("page.js").read_text()


def test_only_our_own_script_and_style_may_act(any_page):
    parsed = Parsed(any_page)
    assert [(tag, attrs) for tag, attrs, _ in parsed.raw] == [
        ("style", {}), ("script", {"type": "application/json", "id": "data"}), ("script", {}),
    ]  # fmt: skip
    policy = next(
        attrs["content"] for tag, attrs in parsed.elements if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    script = next("".join(text) for tag, attrs, text in parsed.raw if (tag, attrs) == ("script", {}))
    for directive, text in (("script-src", script), ("style-src", parsed.text_of("style"))):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


def test_hostile_strings_are_shown_and_do_nothing(hostile, tmp_path):
    text = write_html(hostile, tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    parsed = Parsed(text)
    assert any("<script>alert(1)</script>\"'&</style>" in shown for shown in parsed.shown)
    data = parsed.text_of("script", id="data")
    assert not set("<>&'\u2028\u2029") & set(data)
    names = [name for chart in json.loads(data) for name in chart["names"]]
    assert any("<script>alert(1)</script>" in name for name in names)


def test_embedded_data_means_the_same():
    data = {HOSTILE: ["</script><!--", "\u2028", 1.5, None]}
    assert json.loads(page.embedded(data)) == data
    assert not set("<>&'\u2028\u2029") & set(page.embedded(data))


def test_the_charts_of_the_page_are_those_of_the_view(document, tmp_path):
    parsed = Parsed(write_html(document, tmp_path / "a.html").read_text(encoding="utf-8"))
    drawn = json.loads(parsed.text_of("script", id="data"))
    view = build(document)
    assert [chart["title"] for chart in drawn] == [chart.title for chart in view.charts]
    assert drawn[1]["steps"][12] == 12
    assert drawn[1]["columns"][0][12] == 6.0
    places = [int(attrs["data-chart"]) for _, attrs in parsed.elements if "data-chart" in attrs]
    assert places == list(range(len(drawn)))


def test_the_bundled_library_keeps_its_licence():
    assets = Path(page.__file__).with_name("assets")
    assert "MIT License" in (assets / "uplot.LICENSE").read_text()
    assert (assets / "uplot.min.js").read_text().startswith("/*! https://github.com/leeoniya/uPlot (v1.6")

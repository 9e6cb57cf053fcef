"""What a page hears of: changes that change no file of a run, pages that were drawn too early, streams and their ends."""

import asyncio
import json
import re
import subprocess
import sys

from run_folders import a_process, a_run, a_study
from starlette.requests import Request

from hotloop import record
from hotloop.record import RunRecord
from hotloop.ui import processes, watching
from hotloop.ui.compare_pages import ComparePages
from hotloop.ui.run_pages import RunPages
from hotloop.ui.site import Site


def names_in(text):
    return re.findall(r'<a href="/run\?run=([^"]+)">', text)


def test_what_is_compared_hears_of_each_run(root, access):
    for name in ("a", "b"):
        a_run(root / name, status="running")
    site = Site(root, access, None)
    site.news = lambda look, pause: look
    look = ComparePages(site).news(Request({"type": "http", "query_string": b"run=a&run=b", "headers": []}))
    before = look()
    assert look() == before
    with (root / "b" / record.LINES).open("a") as lines:
        lines.write(json.dumps({"time": 9.0, "set": {"status": "finished"}}) + "\n")
    assert look() != before


def test_a_page_that_was_made_before_its_stream_began_hears_of_the_change_between(root, access):
    written = RunRecord(root / "a")
    site = Site(root, access, None)
    seen = str(site.watching.run(root / "a").serial)
    written.finish()

    async def first(look, seen):
        stream = site.news(look, lambda: 0.0, seen).body_iterator
        said = [await anext(stream) for _ in range(2)]
        await stream.aclose()
        return said[1]

    look = lambda: str(site.watching.run(root / "a").serial)  # noqa: E731
    assert asyncio.run(first(look, seen)) == b"event: changed\ndata: 1\n\n"


def test_a_stream_ends_with_its_server(root, access):
    site = Site(root, access, None)
    site.stopping = True

    async def all_of():
        return [one async for one in site.news(lambda: 1, lambda: 0.0, 1).body_iterator]

    assert asyncio.run(all_of()) == [b"retry: 2000\n\n"]


def test_the_list_hears_of_an_end_that_changes_no_file(root, access, monkeypatch):
    told = a_process(root, monkeypatch)
    site = Site(root, access, None)
    site.news = lambda look, pause: look
    look = RunPages(site).list_news(None)
    before = look()
    assert site.watching.row(root / "a").process is not None  # the list is drawn behind that look
    monkeypatch.setattr(processes, "_is_ours", lambda pid: pid != told["pid"])
    assert look() != before
    assert site.watching.row(root / "a").process is None


def test_the_list_hears_of_a_run_that_was_looked_at_too_soon(root, access, monkeypatch):
    a_process(root, monkeypatch, done=1)
    monkeypatch.setattr(watching, "LEAST_SECONDS", 1000.0)
    site = Site(root, access, None)
    site.news = lambda look, pause: look
    look = RunPages(site).list_news(None)
    assert site.watching.row(root / "a").done == 0.1
    said = (root / "a" / record.LINES).read_text().splitlines()
    with (root / "a" / record.LINES).open("a") as lines:
        lines.write(said[-1].replace('"step": 1', '"step": 4') + "\n")
    before = look()
    assert site.watching.row(root / "a").done == 0.1  # its page is not renewed so soon
    monkeypatch.setattr(watching, "LEAST_SECONDS", 0.0)
    assert look() != before
    assert site.watching.row(root / "a").done == 0.4


def test_a_record_whose_process_is_gone_is_heard_of_although_no_file_changes(root, access):
    """A program with a `Loop` of its own holds no lock of the folder: its record alone names its process."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100_000)"])
    try:
        folder = a_run(root / "a", status="running")
        told = {"pid": process.pid, "process_started": record.process.started(process.pid)}
        with (folder / record.LINES).open("a") as lines:
            lines.write(json.dumps({"time": 9.0, "set": told}) + "\n")
        site = Site(root, access, None)
        site.news = lambda look, pause, seen=None: look
        pages = RunPages(site)
        of_list, of_run = pages.list_news(None), pages.run_news(Request({"type": "http", "query_string": b"run=a"}))
        assert site.watching.row(folder).status == site.watching.run(folder).status == "running"
        before = of_list(), of_run()
        assert (of_list(), of_run()) == before
    finally:
        process.kill()
        process.wait()
    assert of_list() != before[0]
    assert of_run() != before[1]
    assert site.watching.row(folder).status == site.watching.run(folder).status == "killed"
    before = of_list(), of_run()
    assert (of_list(), of_run()) == before


def test_the_page_of_a_search_hears_of_its_trials_and_of_its_first_document(client, root, access):
    folder = root / "search"
    folder.mkdir(parents=True)
    (folder / "study.yaml").write_text("recipe: {name: digits}\n")
    assert client.get("/run/part?part=summary&run=search").text == ""
    assert client.get("/run/charts?run=search").json() == []
    a_study(root / "other")
    (root / "other" / "study.json").rename(folder / "study.json")
    assert "Best accuracy" in client.get("/run/part?part=summary&run=search").text
    assert len(client.get("/run/charts?run=search").json()) == 1
    site = Site(root, access, None)
    site.news = lambda look, pause, seen=None: look
    look = RunPages(site).run_news(Request({"type": "http", "query_string": b"run=search"}))
    before = look()
    a_run(folder / "trials" / "0", status="running")
    with_trial = look()
    assert with_trial != before
    with (folder / "trials" / "0" / record.LINES).open("a") as lines:
        lines.write(json.dumps({"time": 9.0, "set": {"status": "finished"}}) + "\n")
    assert look() != with_trial
    assert "search/trials/0" in client.get("/run/part?part=members&run=search").text


def test_of_many_trials_the_last_are_listed(client, root, monkeypatch):
    monkeypatch.setattr(watching, "MEMBERS", 2)
    a_study(root / "search")
    for number_ in range(5):
        a_run(root / "search" / "trials" / str(number_), accuracies=(0.5,))
    text = client.get("/run?run=search").text
    assert [one for one in names_in(text) if "trials" in one] == ["search/trials/3", "search/trials/4"]
    assert "3 earlier ones" in text


def test_a_page_hears_of_an_export_of_another_tab(root, access):
    folder = a_run(root / "a")
    site = Site(root, access, None)
    before = site.watching.run(folder).serial
    (folder / "export-best").mkdir()
    assert site.watching.run(folder).serial != before


def test_what_a_process_takes_is_told_while_no_file_changes(client, root, monkeypatch):
    told = a_process(root, monkeypatch)
    assert "The process holds" in client.get("/run/usage?run=a").text
    monkeypatch.setattr(processes, "_is_ours", lambda pid: pid != told["pid"])
    assert "The process holds" not in client.get("/run/usage?run=a").text

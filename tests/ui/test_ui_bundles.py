"""Bundles of compiled code on the page of the machine: exported with their checksum, imported once a person agreed."""

import json
from pathlib import Path

import pytest

from hotloop.ui import bundle_pages, processes

SCRIPT = "<script>alert(1)</script>"
SUM = "a" * 64


@pytest.fixture
def commands(monkeypatch):
    """Stands in for the commands of hotloop; gives what they were asked, and answers as the last one says."""
    asked, answer = [], [0, json.dumps({"checksum": SUM, "bytes": 7, "files": 3}), ""]

    def ask(arguments, seconds):
        asked.append(arguments)
        if arguments[:2] == ["cache", "export"] and not answer[0]:
            Path(arguments[2]).write_bytes(b"bundle")
        return tuple(answer)

    monkeypatch.setattr(processes, "ask", ask)
    return asked, answer


def test_an_export_is_a_link_with_its_checksum_that_stays(client, root, commands):
    assert "Exported 3 files" in client.post("/cache/export").text
    text = client.get("/cache/bundles").text
    assert SUM in text
    name = next((root / bundle_pages.FOLDER).glob("*.zip")).name
    assert f"/cache/bundle?name={name}" in text
    got = client.get("/cache/bundle", params={"name": name})
    assert got.content == b"bundle"
    assert got.headers["content-disposition"].startswith("attachment")


def test_an_export_that_fails_says_why(client, commands):
    commands[1][:] = [1, "", f"hotloop: nothing is kept {SCRIPT}"]
    text = client.post("/cache/export").text
    assert "nothing is kept" in text
    assert SCRIPT not in text


def test_an_import_says_that_it_is_code_and_asks(client, tmp_path, commands):
    (tmp_path / "-b.zip").write_bytes(b"x")
    typed = {"bundle": str(tmp_path / "-b.zip"), "checksum": SUM}
    asked = client.post("/cache/import", data=typed).text
    assert "will run as you" in asked
    assert f'value="{SUM}"' in asked  # what was typed stays
    assert not commands[0]
    assert "Imported 3 files" in client.post("/cache/import", data={**typed, "sure": "yes"}).text
    assert commands[0] == [["cache", "import", "--json", "--checksum", SUM, "--", typed["bundle"]]]


def test_an_import_without_a_checksum_is_warned_of(client, tmp_path, commands):
    (tmp_path / "b.zip").write_bytes(b"x")
    assert "nothing tells whose" in client.post("/cache/import", data={"bundle": str(tmp_path / "b.zip")}).text


@pytest.mark.parametrize(
    ("bundle", "checksum", "said"),
    [
        ("/nonesuch", "", "no such file"),
        ("", "", "no such file"),
        (SCRIPT, "", "no such file"),
        (__file__, "x", "64 digits"),
    ],
)
def test_what_cannot_be_imported_is_said_and_stays_typed(client, commands, bundle, checksum, said):
    text = client.post("/cache/import", data={"bundle": bundle, "checksum": checksum, "sure": "yes"}).text
    assert said in text
    assert SCRIPT not in text
    assert not commands[0]


@pytest.mark.parametrize(
    "name", ["../queue/x", "x.zip", "hotloop-20261126-120000.zip.json", "", "hotloop-20261126-120000.zip"]
)
def test_only_bundles_are_served(client, root, tmp_path, name):
    folder = root / bundle_pages.FOLDER
    folder.mkdir(parents=True)
    (folder / "x.zip").write_text("secret")
    (tmp_path / "secret").write_text("secret")
    (folder / "hotloop-20261126-120000.zip").symlink_to(tmp_path / "secret")
    assert client.get("/cache/bundle", params={"name": name}).status_code == 404
    assert "hotloop-2026" not in client.get("/cache/bundles").text.replace("/tmp/hotloop-2026", "")

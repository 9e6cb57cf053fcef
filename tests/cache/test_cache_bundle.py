"""Bundles of compiled code, and the command: what one machine exported, another of its kind imports."""

import contextlib
import json
import random
import zipfile

import pytest
from compiled_files import CONTENT, MODELS, held, put
from typer.testing import CliRunner

from hotloop.cache import bundle, compiled
from hotloop.cache.compiled import CompiledStore, sha256_of
from hotloop.cache.keys import fits
from hotloop.errors import DataError


@pytest.fixture
def made(store, tmp_path):
    put(store)
    return bundle.export_bundle(store, tmp_path / "bundle.zip")


@pytest.fixture
def other(tmp_path):
    return CompiledStore(tmp_path / "other")


def test_a_bundle_brings_what_was_exported(made, other, tmp_path):
    got = bundle.import_bundle(other, tmp_path / "bundle.zip", checksum=made.checksum[:16], model="ffff")
    assert (got.checksum, got.size) == (made.checksum, made.size)
    assert held(other) == CONTENT


@pytest.mark.parametrize("name", list(fits()))
@pytest.mark.usefixtures("made")
def test_a_bundle_that_does_not_fit_is_refused_with_the_part(store, other, tmp_path, monkeypatch, name):
    here = {**fits(), name: "another"}
    monkeypatch.setattr(bundle, "fits", lambda: here)
    with pytest.raises(DataError, match=rf"does not fit this machine: it was made for {name} .* \(here another\)"):
        bundle.import_bundle(other, tmp_path / "bundle.zip")
    with pytest.raises(DataError, match="no compiled code is kept that fits"):
        bundle.export_bundle(store, tmp_path / "more.zip")
    assert not other.folder.exists()


def test_a_bundle_of_another_model_or_checksum_is_refused(made, other, tmp_path, store):
    with pytest.raises(DataError, match="not made for the model abc, but for ffffffffffff"):
        bundle.import_bundle(other, tmp_path / "bundle.zip", model="abc")
    with pytest.raises(DataError, match="it is not that bundle"):
        bundle.import_bundle(other, tmp_path / "bundle.zip", checksum="0" * 64)
    with pytest.raises(DataError, match="no compiled code is kept for the model abc; there is some for ffffffffffff"):
        bundle.export_bundle(store, tmp_path / "more.zip", model="abc")
    assert not other.folder.exists()


def rewritten(path, change):
    """Rewrite a bundle's members."""
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in members.items():
            new.writestr(name, data)


def swap_code(members):
    members[f"objects/{sha256_of(CONTENT['cx/code.py'])}"] = b"evil()!"


def swap_manifest(members):
    document = json.loads(members["manifest.json"])
    document["parts"][0]["files"][0][1] = sha256_of(b"evil")
    members["manifest.json"] = json.dumps(document).encode()
    members[f"objects/{sha256_of(b'evil')}"] = b"evil"


def lead_out(members):
    document = json.loads(members["manifest.json"])
    document["parts"][0]["files"][0][0] = "../../evil"
    members["manifest.json"] = json.dumps(document).encode()
    members["manifest.sha256"] = sha256_of(members["manifest.json"]).encode()


def fill(members):
    members[f"objects/{sha256_of(CONTENT['cx/code.py'])}"] = bytes(50_000_000)  # a bomb: 50 kB in the file


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (swap_code, "cx/code.py is not what the manifest says"),
        (swap_manifest, "the manifest is not what its checksum says"),
        (lead_out, "a file that cannot be"),
        (fill, "has more than 7 bytes"),
        (lambda members: members.pop("manifest.json"), "has no manifest.json"),
        (lambda members: members.pop("manifest.sha256"), "has no manifest.sha256"),
        (lambda members: members.pop(max(members)), "has no objects/"),
    ],
)
def test_a_bundle_that_was_changed_is_refused(made, other, tmp_path, change, why):
    rewritten(tmp_path / "bundle.zip", change)
    with pytest.raises(DataError, match=why):
        bundle.import_bundle(other, tmp_path / "bundle.zip")
    assert not other.folder.exists()


@pytest.mark.parametrize("seed", range(25))
def test_a_bundle_that_is_damaged_anywhere_is_refused_or_whole(made, other, tmp_path, seed):
    path, draw = tmp_path / "bundle.zip", random.Random(seed)
    data = path.read_bytes()
    at = draw.randrange(len(data))
    path.write_bytes(data[:at] if seed % 2 else data[:at] + draw.randbytes(8) + data[at + 8 :])
    with contextlib.suppress(DataError):
        bundle.import_bundle(other, path)
        assert held(other) == CONTENT  # a date in the zip's own directory, say, changes nothing


# -- the command --------------------------------------------------------------------------------------------------------


def command(*arguments):
    from hotloop.cli import app

    return CliRunner().invoke(app, ["cache", *arguments])


def test_the_command_shows_clears_exports_and_imports(home, tmp_path):
    shown = command()
    assert shown.exit_code == 0
    assert "0.0 MiB of compiled code" in shown.stdout
    store = compiled.compiled_store()
    kept = put(store).name
    stale = put(store, {"old": b"old" * 100}, {**fits(), "torch": "1.0"}, {"e" * 32: "[red]Evil"}).name
    found = json.loads(command("--json").stdout)
    assert found["folder"] == str(home / "compiled")
    rows = {row["name"]: row for row in found["entries"]}
    assert (rows[kept]["stale"], rows[kept]["hits"], rows[kept]["models"]) == ("", 0, MODELS)
    assert rows[stale]["stale"].startswith("made for torch 1.0 (here ")
    assert "[red]Evil" in command().stdout
    exported = json.loads(command("export", str(tmp_path / "b.zip"), "--json").stdout)
    assert exported["files"] == len(CONTENT)
    assert json.loads(command("clear", "--stale", "--json").stdout)["removed"] == [stale]
    assert "1 removed" in command("clear").stdout
    assert store.entries() == []
    refused = command("import", str(tmp_path / "b.zip"), "--checksum", "123")
    assert refused.exit_code != 0
    assert isinstance(refused.exception, DataError)
    assert command("import", str(tmp_path / "b.zip"), "--checksum", exported["checksum"]).exit_code == 0
    assert len(store.entries()) == 1
    assert "import only bundles that you made yourself" in " ".join(command("import", "--help").stdout.split())


def test_the_command_with_nothing_kept_says_so(home, monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", "")
    assert "HOTLOOP_CACHE_DIR is empty" in str(command().exception)

"""A shared cache: what one machine compiled, others of its kind take from a folder or a URL."""

import json
import zipfile

import fsspec
import pytest
from compiled_files import CONTENT, held, put
from typer.testing import CliRunner

from hotloop import cli
from hotloop.cache import share
from hotloop.cache.compiled import CompiledStore
from hotloop.cache.keys import fits
from hotloop.errors import ConfigError

MORE = {"fxgraph/cd/entry": b"another" * 50}
OTHER = {"e" * 32: "Another"}


@pytest.fixture(params=["folder", "memory"])
def url(request, tmp_path):
    yield str(tmp_path / "share") if request.param == "folder" else f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def other(tmp_path):
    return CompiledStore(tmp_path / "other")


def bundles(url):
    files, root = fsspec.url_to_fs(url)
    return [name for name in files.find(root) if name.endswith(".zip")]


def test_what_one_machine_gave_another_takes_once(url, store, other):
    put(store)
    given = share.Share(url).push(store)
    assert (given.bundles, given.misses) == (1, ())
    assert given.size > 0
    assert share.Share(url).push(store).bundles == 0
    assert share.Share(url).pull(other) == given
    assert held(other) == CONTENT
    assert share.Share(url).pull(other).bundles == 0
    assert share.Share(url).pull(store).bundles == 0


def test_a_share_without_code_for_this_machine_names_the_parts_that_differ(url, store, other, monkeypatch):
    here = fits()
    for change in ({"torch": "2.11.0", "gpu": "a card"}, {"torch": "2.12.0"}):
        monkeypatch.setattr(share, "fits", lambda change=change: {**here, **change})
        put(store, here={**here, **change})
        share.Share(url).push(store)
    monkeypatch.undo()
    (why,) = share.Share(url).pull(other).misses
    assert why == f"it has code for torch 2.12.0 (here {here['torch']})"
    assert other.entries() == []


def test_a_damaged_bundle_is_left_out_and_named(url, store, other):
    put(store)
    share.Share(url).push(store)
    (name,) = bundles(url)
    files, _ = fsspec.url_to_fs(url)
    files.pipe_file(name, files.cat_file(name)[:-200])
    put(store, MORE, models=OTHER)
    share.Share(url).push(store)
    moved = share.Share(url).pull(other)
    assert moved.bundles == 1
    (why,) = moved.misses
    assert name in why
    assert held(other) == MORE


def test_a_folder_that_anybody_may_write_to_is_refused(tmp_path):
    (tmp_path / "share").mkdir()
    (tmp_path / "share").chmod(0o777)
    with pytest.raises(ConfigError, match=r"anybody may write to .*chmod o-w"):
        share.Share(str(tmp_path / "share"))
    with pytest.raises(ConfigError, match=r"anybody may write to"):  # a dry run looks at the setting alone
        share.check_url(f"file://{tmp_path / 'share'}")


def test_a_file_is_no_shared_cache(tmp_path):
    (tmp_path / "share").write_text("x")
    with pytest.raises(ConfigError, match=r"cache\.share=.*share: expected a folder, and this is a file"):
        share.check_url(str(tmp_path / "share"))


@pytest.mark.parametrize(
    "url", ["s3://key:a/secret@bucket/cache", "sftp://me:secret@host:22/cache", "ftp://me:secret@host"]
)
def test_a_password_in_a_url_is_refused_and_not_shown(url):
    with pytest.raises(ConfigError, match=r"cache.share=[a-z3]+://\*\*\*@.*: expected no password") as raised:
        share.Share(url)
    assert "secret" not in str(raised.value)


def test_an_empty_url_is_not_the_working_folder():
    with pytest.raises(ConfigError, match=r"cache.share is empty.*null shares nothing"):
        share.Share("")


def test_a_share_that_cannot_be_reached_costs_a_run_nothing(store, home, monkeypatch, tmp_path):
    monkeypatch.setattr(share, "compiled_store", lambda: store)
    put(store)
    (tmp_path / "file").write_text("in the way")
    said, ran = [], False
    with share.shared_cache(str(tmp_path / "file" / "share"), said.append):
        ran = True
    assert ran
    assert len(said) == 2
    assert "cannot be read: NotADirectoryError" in said[0]
    assert all("The run goes on without it" in one for one in said)


def test_a_run_gives_nothing_that_other_programs_compiled(store, url, monkeypatch):
    monkeypatch.setattr(share, "compiled_store", lambda: store)
    put(store)
    others = {entry.name for entry in store.entries()}
    with share.shared_cache(url, lambda _: None):
        put(store, MORE, models=OTHER)
    (given,) = bundles(url)
    assert given[-68:-4] in {entry.name for entry in store.entries()} - others


def test_the_store_is_given_by_the_command_line_and_taken(home, tmp_path, monkeypatch):
    put(CompiledStore(home / "compiled"))
    run = CliRunner().invoke(cli.app, ["cache", "push", str(tmp_path / "share"), "--json"])
    assert json.loads(run.stdout)["bundles"] == 1
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", str(tmp_path / "new"))
    run = CliRunner().invoke(cli.app, ["cache", "pull", str(tmp_path / "share")])
    assert run.stdout.startswith("taken: 1 bundle, ")
    assert len(CompiledStore(tmp_path / "new" / "compiled").entries()) == 1
    with zipfile.ZipFile(bundles(str(tmp_path / "share"))[0]) as archive:
        assert "manifest.json" in archive.namelist()

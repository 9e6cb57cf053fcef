"""Folders of compiled code: torch's caches in a place that only this user can have written."""

import getpass
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from compiled_files import CONTENT, put
from torch import nn

from hotloop.cache import compiled, shared_compiles
from hotloop.cache.keys import fits


def test_what_torch_writes_in_a_block_is_there_for_the_next_process(home):
    model = nn.Linear(2, 2)
    with shared_compiles(model) as place:
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(place)
        assert place.stat().st_mode & 0o77 == 0
        (place / "fxgraph").mkdir()
        (place / "fxgraph" / "one").write_bytes(b"1")
        with shared_compiles(model) as again:  # nested, as a loop over trials in a process that already shares
            assert again == place
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    with shared_compiles(nn.Linear(2, 2)) as other:  # as in another process
        assert (other / "fxgraph" / "one").read_bytes() == b"1"
    (entry,) = compiled.compiled_store().entries()
    assert (entry.uses, list(entry.models.values()), list(entry.files)) == (3, ["Linear"], ["fxgraph/one"])


@pytest.mark.campaign
@pytest.mark.inductor
def test_a_second_process_compiles_nothing_anew(home):
    program = (
        "import torch, hotloop; from hotloop.cache import shared_compiles; model = torch.nn.Linear(3, 5)\n"
        "with shared_compiles(model):\n"
        "    hotloop.compile(model, 'default'); model(torch.ones(2, 3)).sum().backward()\n"
        "found = hotloop.status(model).components['model']; print(found.state, found.cache_hits, found.cache_misses)"
    )
    said = [
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
        for _ in range(2)
    ]
    assert [(state, misses) for state, _, misses in said] == [("compiled", said[0][2]), ("compiled", "0")]
    assert int(said[0][2]) > 0


def test_other_models_versions_and_hardware_have_other_folders(home, monkeypatch):
    places = []
    for model, change in ((nn.Linear(2, 2), {}), (nn.Linear(2, 3), {}), (nn.Linear(2, 2), {"gpu": "another"})):
        monkeypatch.setattr(compiled, "fits", lambda change=change: {**fits(), **change})
        with shared_compiles(model) as place:
            places.append(place)
    assert len(set(places)) == 3


@pytest.mark.parametrize("name", list(fits()))
def test_code_of_another_version_or_machine_is_stale(store, name):
    entry = put(store, here={**fits(), name: "another"})
    assert entry.stale(fits()).startswith(f"made for {name} another (here ")
    assert put(store).stale(fits()) == ""


def test_clearing_removes_what_is_doomed(store):
    old, new = put(store, here={**fits(), "torch": "1.0"}), put(store)
    name = old.name
    assert store.clear(lambda entry: bool(entry.stale(fits()))) == [(name, sum(map(len, CONTENT.values())))]
    assert [entry.name for entry in store.entries()] == [new.name]


@pytest.mark.parametrize("which", ["", "entry"])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_not_believed(store, which, mode, caplog):
    entry = put(store)
    (entry.folder if which else store.folder).chmod(mode)
    assert store.entries() == []
    assert "is not used: " in caplog.text


def test_what_another_user_owns_is_neither_believed_nor_used(home, monkeypatch, caplog):
    store = compiled.compiled_store()
    put(store)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert store.entries() == []
    with shared_compiles() as place:
        assert place is None
    assert "compiled code is not kept: " in caplog.text


def test_a_folder_that_the_user_chose_is_left_alone(home, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "chosen"))
    with shared_compiles() as place:
        assert place is None
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "chosen")


def test_with_no_folder_nothing_is_shared_or_changed(home, monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", "")
    with shared_compiles() as place:
        assert place is None
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


@pytest.mark.parametrize("spoiled", [lambda place: place.chmod(0o777), None])
def test_headers_that_another_user_may_write_are_not_compiled_in(home, monkeypatch, tmp_path, caplog, spoiled):
    from torch._inductor import config

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = Path(tmp_path, f"torchinductor_{getpass.getuser()}")
    if spoiled:
        place.mkdir()
        spoiled(place)
    with shared_compiles():
        assert config.cpp_cache_precompile_headers is not bool(spoiled)
    assert config.cpp_cache_precompile_headers
    assert ("precompiled headers are not used" in caplog.text) is bool(spoiled)

"""The documents of a run, a cross-validation and a search are read, checked and written by one `record.Schema`."""

import multiprocessing
import os
import stat
import threading

import pytest

from hotloop import record
from hotloop.errors import RecordError
from hotloop.record import schema
from hotloop.report import folds, study

KINDS = [record.SCHEMA, folds.SCHEMA, study.SCHEMA]
by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.file)


def least(kind, **more):
    """The smallest document of a kind."""
    return {"schema": 1, **{name: [] for name in kind.lists}, **{name: {} for name in kind.mappings}, **more}


@by_kind
def test_what_was_written_is_read_from_the_folder_or_by_its_name(kind, tmp_path):
    assert not kind.is_at(tmp_path)
    kind.write(tmp_path / "new", {**least(kind), "figure": float("nan"), "schema": None})
    for path in (tmp_path / "new", tmp_path / "new" / kind.file):
        assert kind.is_at(path)
        assert kind.load(path) == {**least(kind), "figure": "nan"}
    assert [one.name for one in (tmp_path / "new").iterdir()] == [kind.file]


@by_kind
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no readable {name}: .*No such file"),
        ("{", "no readable {name}"),
        ("[" * 100_000, "no readable {name}"),
        ("[]", "no {name}: expected a JSON object, found list"),
        ('{"schema": 0}', "schema 0; this version of hotloop reads 1 to 1"),
        ('{"schema": 2}', "schema 2; .*: is it a {name}, and is hotloop up to date"),
        ('{"schema": 1}', "no {name}: {first}.* missing or of another type"),
    ],
)
def test_all_are_refused_in_one_voice(kind, text, said, tmp_path):
    if text is not None:
        (tmp_path / kind.file).write_text(text)
    with pytest.raises(RecordError, match=f"{kind.file} .*" + said.format(name=kind.name, first=kind.lists[0])):
        kind.load(tmp_path / kind.file)


@by_kind
def test_what_is_too_large_or_no_file_is_not_read(kind, tmp_path, monkeypatch):
    kind.write(tmp_path, least(kind))
    monkeypatch.setattr(schema, "LARGEST", 10)
    with pytest.raises(RecordError, match=r"no readable .*: it has \d+ bytes, expected 10 at most"):
        kind.load(tmp_path)
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / kind.file)
    with pytest.raises(RecordError, match="it is no regular file"):
        kind.load(tmp_path / "pipes")


def written(path, letter):
    for _ in range(200):
        with record.whole(path, durable=False, shared=True) as file:
            for _ in range(20):
                file.write(letter * 1000)
                file.flush()


def test_processes_that_write_one_file_leave_it_whole(tmp_path):
    path, made = tmp_path / "both", multiprocessing.get_context("fork")
    others = [made.Process(target=written, args=(path, letter)) for letter in (b"a", b"b")]
    for one in others:
        one.start()
    seen = set()
    while any(one.is_alive() for one in others):
        seen.add(path.read_bytes() if path.exists() else b"a" * 20_000)
    for one in others:
        one.join()
        assert one.exitcode == 0
    assert seen <= {b"a" * 20_000, b"b" * 20_000}


def test_a_file_has_its_permissions_before_anything_is_in_it(tmp_path):
    with record.whole(tmp_path / "secret", mode=0o600) as file:
        (part,) = tmp_path.iterdir()
        assert stat.S_IMODE(part.stat().st_mode) == 0o600
        file.write(b"x")
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_two_threads_may_write_a_shared_file_at_once(tmp_path):
    def write():
        with record.whole(tmp_path / "shared", shared=True) as file:
            file.write(b"second")

    with record.whole(tmp_path / "shared", shared=True) as file:
        file.write(b"first")
        other = threading.Thread(target=write)
        other.start()
        other.join()
        assert (tmp_path / "shared").read_bytes() == b"second"
    assert (tmp_path / "shared").read_bytes() == b"first"
    assert [one.name for one in tmp_path.iterdir()] == ["shared"]

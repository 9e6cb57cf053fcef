"""Files that somebody may have planted: only regular ones of a limited size are read, and no link is written through."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hotloop import files, host


def _planted(kind: str, path: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.with_name("target").write_bytes(b"the target's own")
        path.symlink_to("target")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["pipe", "link", "device", "folder"])
def test_what_is_no_regular_file_is_neither_read_nor_appended_to(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    _planted(kind, path)
    found = {"device": "link"}.get(kind, kind)  # a link that leads to a device
    for use in (files.read, files.open_append, files.open_regular, lambda at: files.open_regular(at, change=True)):
        with pytest.raises(OSError, match=f"it is no regular file, but a {found}"):
            use(path)
    if kind == "link":
        assert path.with_name("target").read_bytes() == b"the target's own"


def test_a_link_to_a_regular_file_is_read_where_it_may_be_one_and_a_device_behind_a_link_is_not(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"text")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    assert files.read(tmp_path / "link", links=True) == b"text"
    with pytest.raises(OSError, match="no regular file, but a device"):
        files.read(tmp_path / "zeros", links=True)


def test_a_file_above_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"four")
    assert files.read(tmp_path / "file", 4) == b"four"
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(2**40)
    with pytest.raises(OSError, match="1,099,511,627,776 bytes, expected 4 at most"):
        files.read(tmp_path / "sparse", 4)


@pytest.mark.parametrize("shared", [False, True])
def test_links_at_a_file_and_at_its_unfinished_one_are_replaced_and_not_followed(tmp_path: Path, shared: bool) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    for name in ("last.pt", ".last.pt.part", f".last.pt.{os.getpid()}-{threading.get_ident()}.part"):
        (tmp_path / name).symlink_to(mine)
    with files.whole(tmp_path / "last.pt", durable=False, shared=shared) as file:
        Path(file.name).write_bytes(b"new")
    assert (mine.read_bytes(), (tmp_path / "last.pt").read_bytes()) == (b"mine", b"new")
    assert not (tmp_path / "last.pt").is_symlink()


def test_what_a_kill_left_of_a_file_is_removed_by_the_next_writing_unless_others_write_too(tmp_path: Path) -> None:
    left, other = tmp_path / f".last.pt.{'a' * 8}.part", tmp_path / f".best.pt.{'a' * 8}.part"
    for one in (left, other):
        one.touch()
        os.utime(one, (1, 1))
    with files.whole(tmp_path / "last.pt", shared=True):
        pass
    assert left.exists()
    with files.whole(tmp_path / "last.pt"):
        pass
    assert sorted(one.name for one in tmp_path.iterdir()) == [other.name, "last.pt"]


def test_two_writers_of_one_file_leave_each_other_the_unfinished_one(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    with files.whole(path) as first:
        first.write(b"first")
        files._cleaned.clear()  # as another process begins
        with files.whole(path) as second:
            second.write(b"second")
    assert path.read_bytes() == b"first"


def test_a_folder_is_listed_once_for_each_file_that_is_written_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[Path] = []
    real = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: listed.append(self) or real(self))
    for _ in range(3):
        with files.whole(tmp_path / "last.pt", durable=False):
            pass
    assert listed == [tmp_path]


@pytest.mark.parametrize("name", ["checkpoints/last.pt", "fold-0/checkpoints/last.pt", "checkpoints/deeper/last.pt"])
def test_a_link_among_the_folders_of_a_run_is_neither_read_nor_written_through(tmp_path: Path, name: str) -> None:
    real, elsewhere = tmp_path / "real", tmp_path / "elsewhere"
    (elsewhere / "deeper").mkdir(parents=True)
    (elsewhere / "last.pt").write_bytes(b"mine")
    run = tmp_path / "run"
    run.symlink_to(real)  # the folder itself may be one
    linked = (run / name).parent if "deeper" not in name else run / "checkpoints"
    real.mkdir()
    linked.parent.mkdir(exist_ok=True)
    linked.symlink_to(elsewhere)
    files.guard(run)
    with files.whole(run / "record.json") as file:
        file.write(b"{}")
    assert files.read(run / "record.json") == b"{}"
    for use in (files.read, files.open_append, lambda at: files.whole(at).__enter__()):
        with pytest.raises(OSError, match=f"{linked} is a link to another folder: remove it"):
            use(run / name)
    assert (elsewhere / "last.pt").read_bytes() == b"mine"
    assert sorted(one.name for one in elsewhere.iterdir()) == ["deeper", "last.pt"]


def test_a_pipe_is_read_to_its_end_within_a_limit_of_bytes_and_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for text in (b"a: 1\n", b"a" * 200_000):
        writer = threading.Thread(target=pipe.write_bytes, args=(text,))
        writer.start()
        assert files.read_pipe(pipe) == text
        writer.join()
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.05)
    with pytest.raises(OSError, match="its end did not come within 0 s"):
        files.read_pipe(pipe)
    reader, writer_ = os.pipe()
    os.write(writer_, b"four")
    with pytest.raises(OSError, match="more than 3 bytes come through it"):
        files.read_pipe(Path(f"/dev/fd/{reader}"), 3)
    with pytest.raises(OSError, match="its end did not come"):  # somebody holds it open
        files.read_pipe(Path(f"/dev/fd/{reader}"))
    os.close(reader)
    os.close(writer_)


def test_what_helps_against_a_link_is_said_and_room_is_not_asked_for(tmp_path: Path) -> None:
    link = tmp_path / "run.lock"
    link.symlink_to("target")
    with pytest.raises(OSError, match="Errno") as refused:
        os.open(link, os.O_RDONLY | os.O_NOFOLLOW)
    refused.value.filename = str(link)
    assert files.cannot(refused.value) == f"{link} is a link: remove it"
    assert files.cannot(OSError(28, "No space left")) == (
        "[Errno 28] No space left. Make room, or change its permissions"
    )


def test_a_writing_that_fails_leaves_the_former_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"former")
    with pytest.raises(ZeroDivisionError), files.whole(path) as file:
        file.write(b"half")
        _ = 1 / 0
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("file", b"former")]


def test_an_appended_file_keeps_what_it_has_and_can_be_changed_in_place(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for text in (b"one\n", b"two\n"):
        with files.open_append(path) as file:
            file.write(text)
    with files.open_regular(path, change=True) as file:
        file.write(b"ONE")
    assert path.read_bytes() == b"ONE\ntwo\n"


@pytest.mark.parametrize(
    ("safe", "main", "flags"),
    [
        (True, {"__spec__": "hotloop"}, ["-P"]),  # python -P -m hotloop
        (False, {"__spec__": "hotloop"}, []),  # python -m hotloop
        (False, {"__spec__": None, "__file__": "bin/hotloop"}, ["-P"]),  # the command hotloop
        (False, {"__spec__": None}, []),  # python -c, and a prompt
    ],
)
def test_a_child_looks_into_the_current_folder_only_where_this_process_does(
    safe: bool, main: dict[str, object], flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {"__main__": SimpleNamespace(**main)}
    ours = SimpleNamespace(executable="python", flags=SimpleNamespace(safe_path=safe), modules=modules)
    monkeypatch.setattr(host, "sys", ours)
    assert host.python("-m", "hotloop") == ["python", *flags, "-m", "hotloop"]

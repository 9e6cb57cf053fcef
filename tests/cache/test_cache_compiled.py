"""The store of compiled code: what one process kept, the next one finds; whatever else is there is a miss."""

import getpass
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from compiled_files import CONTENT, MODELS, put, taken

from hotloop.cache import compiled, process_folder, shared_compiles, torch_files
from hotloop.cache.compiled import CompiledStore, Manifest, sha256_of
from hotloop.cache.keys import fits
from hotloop.cache.process_folder import ProcessFolder
from hotloop.cache.torch_files import files_in


def test_what_was_kept_is_taken_up_and_counted(store, place, said):
    put(store)
    assert taken(store, place) == CONTENT
    assert os.access(place / "cx/library.so", os.X_OK)
    (entry,) = store.entries()
    assert (entry.uses, entry.size, entry.manifest.models) == (1, sum(map(len, CONTENT.values())), MODELS)
    assert not entry.stale(fits())
    assert said == []


def test_a_store_that_is_not_there_is_a_miss_without_a_word(store, place, said):
    assert taken(store, place) == {}
    assert store.entries() == said == []
    assert not store.folder.exists()


@pytest.mark.parametrize("name", list(fits()))
def test_code_of_another_version_or_machine_is_stale_and_never_taken_up(store, place, name):
    put(store, here={**fits(), name: "another"})
    assert taken(store, place) == {}
    (entry,) = store.entries()
    assert entry.stale(fits()).startswith(f"made for {name} another (here ")


@pytest.mark.parametrize("seed", range(40))
def test_a_file_that_is_damaged_anywhere_is_a_miss_and_no_crash(store, place, said, seed):
    """Cut, filled up, overwritten or emptied, at a random place of a random file."""
    put(store)
    draw = random.Random(seed)
    victim = draw.choice(sorted(path for path in store.folder.rglob("*") if path.is_file()))
    data = bytearray(victim.read_bytes())
    at = draw.randrange(len(data))
    damaged = [
        lambda: data[:at],
        lambda: data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :],
        lambda: data + draw.randbytes(9),
        lambda: data[:at] + draw.randbytes(16) + data[at + 16 :],
        lambda: bytes(len(data)),
    ][seed % 5]()
    victim.write_bytes(damaged)
    found = taken(store, place)
    assert all(CONTENT[path] == data for path, data in found.items())
    assert len(found) < len(CONTENT)
    assert said
    put(store)  # and the next process that compiles it puts it right
    assert taken(store, place / "next") == CONTENT


def test_trouble_is_said_once(tmp_path, place, caplog):
    store = CompiledStore(tmp_path / "store")
    put(store)
    for path in (store.folder / "objects").iterdir():
        path.write_bytes(b"other")
    assert taken(store, place) == {}
    assert len([one for one in caplog.records if "is not used" in one.message]) == 1


@pytest.mark.parametrize("which", [".", "objects", "manifests"])
@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702])
def test_a_folder_that_others_may_write_to_is_not_believed(store, place, said, which, mode):
    put(store)
    (store.folder / which).chmod(mode)
    assert taken(store, place) == {}
    assert any("another user owns it or may write to it" in line for line in said)
    with pytest.raises(PermissionError):
        put(store, {"a": b"b"})


def test_what_another_user_owns_is_not_believed(store, place, said, monkeypatch):
    put(store)
    monkeypatch.setattr(os, "getuid", lambda: 12345678)
    assert taken(store, place) == {}
    assert any("another user owns it" in line for line in said)


def test_a_file_that_others_may_write_to_and_a_link_are_not_believed(store, place, said, tmp_path):
    put(store)
    objects = store.folder / "objects"
    open_one = objects / sha256_of(CONTENT["cx/code.py"])
    open_one.chmod(0o666)
    linked = objects / sha256_of(CONTENT["cx/library.so"])
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    assert set(taken(store, place)) == {"fxgraph/ab/entry"}
    assert len(said) == 2
    put(store)  # and whoever compiles them again puts them right
    assert taken(store, place / "next") == CONTENT
    assert (tmp_path / "elsewhere").read_bytes() == CONTENT["cx/library.so"]
    assert len(said) == 2


@pytest.mark.parametrize("path", ["../out", "/etc/x", "a/../../b", "", "a//b", "a\\b", "a b", "a/\n"])
def test_a_manifest_that_leads_out_of_the_folder_is_none(store, place, said, path):
    put(store)
    document = {**json.loads(Manifest(fits(), {}, 0.0, ()).dumps()), "files": [[path, sha256_of(b"x"), 1]]}
    text = json.dumps(document).encode()
    (store.folder / "manifests" / f"{sha256_of(text)}.json").write_bytes(text)
    assert set(taken(store, place)) == set(CONTENT)
    assert any("a file that cannot be" in line for line in said)


NONSENSE = ["[]", "{}", "null", "1", '{"schema": 1}', "[" * 100_000, '{"schema": 2, "files": []}']


@pytest.mark.parametrize("text", NONSENSE, ids=range(len(NONSENSE)))
def test_a_manifest_that_says_nonsense_is_a_miss(store, said, text):
    put(store)
    (store.folder / "manifests" / f"{sha256_of(text.encode())}.json").write_text(text)
    assert len(store.entries()) == 1
    assert said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_store_that_is_read_only_is_used_and_nothing_is_counted(store, place, said):
    put(store)
    for folder in (store.folder, *(path for path in store.folder.iterdir())):
        folder.chmod(0o500)
    try:
        assert taken(store, place) == CONTENT
        with pytest.raises(PermissionError):
            put(store, {"new": b"file"})
    finally:
        for folder in (store.folder, *(path for path in store.folder.iterdir())):
            folder.chmod(0o700)
    assert said == []


KILLED = """
import sys, time
from pathlib import Path
sys.path[:0] = [{tests!r}]
from test_cache_compiled import put
from hotloop.cache.compiled import CompiledStore
store = CompiledStore(Path({folder!r}))
print("ready", flush=True)
for number in range(10_000):
    put(store, {{f"file{{number}}-{{part}}": bytes([number % 251, part]) * 20_000 for part in range(5)}})
"""


@pytest.mark.campaign
def test_kill_9_in_the_middle_of_a_write_leaves_the_next_run_fine(tmp_path, said):
    folder = tmp_path / "store"
    program = KILLED.format(tests=str(Path(__file__).parent), folder=str(folder))
    draw = random.Random(7)
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    time.sleep(draw.uniform(0.05, 0.3))
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    store = CompiledStore(folder, said.append)
    before = store.entries()
    for entry in before:
        assert all(store.read(file) is not None for file in entry.manifest.files)
    put(store)
    assert len(store.entries()) == len(before) + 1
    assert said == []
    for path in folder.rglob("*"):  # what was torn is removed when it is old enough to belong to nobody
        os.utime(path, (1, 1))
    store.clear(lambda entry: False)
    named = {file.digest for entry in store.entries() for file in entry.manifest.files}
    assert {path.name for path in (folder / "objects").iterdir()} == named


def test_the_store_keeps_its_size(store, monkeypatch):
    monkeypatch.setattr(compiled, "MAX_BYTES", 25_000)
    monkeypatch.setattr(compiled, "_TORN_AFTER", -1.0)
    names = []
    for number in range(4):
        names.append(put(store, {f"file{number}": bytes([number]) * 10_000}))
        for path in (store.folder / "manifests").glob("*.json"):
            os.utime(path, (1e9 + names.index(path.stem), 1e9 + names.index(path.stem)))
    assert {entry.name for entry in store.entries()} == set(names[-2:])
    assert len(list((store.folder / "objects").iterdir())) == 2


def test_what_is_there_already_stays_as_it_is(store, place):
    """A library that this process has loaded must not change under it."""
    put(store)
    library = place / "cx/library.so"
    library.parent.mkdir()
    library.write_bytes(b"loaded")
    file = library.stat().st_ino
    assert set(taken(store, place)) == set(CONTENT) - {"cx/library.so"}
    assert (library.read_bytes(), library.stat().st_ino) == (b"loaded", file)


def test_a_disk_that_is_full_ends_nothing_and_leaves_no_half_file(tmp_path, place, caplog):
    """What fits is taken up, the rest is said once; no name stands for half a file."""
    resource = pytest.importorskip("resource")
    store = CompiledStore(tmp_path / "store")
    put(store, {"ab/large.so": b"x" * 300_000, "ab/larger.so": b"y" * 400_000, "ab/small": b"z"})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # fails in the middle of a file, as a full disk does
    try:
        assert taken(store, place) == {"ab/small": b"z"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in place.rglob("*") if path.is_file()] == ["small"]
    assert len([one for one in caplog.records if "cannot be taken up" in one.message]) == 1
    assert taken(store, place).keys() == {"ab/large.so", "ab/larger.so"}  # there is room again


# -- the folder of a process --------------------------------------------------------------------------------------------


def test_torch_writes_into_a_folder_of_the_process_that_is_kept_at_the_end(home, monkeypatch):
    with shared_compiles() as shared:
        inside = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert inside == shared.place
        assert inside.stat().st_mode & 0o77 == 0
        (inside / "fxgraph").mkdir()
        (inside / "fxgraph" / "one").write_bytes(b"1")
        (inside / "triton").mkdir()
        (inside / "triton" / "kernel").write_bytes(b"with absolute paths")
        with shared_compiles() as again:  # nested, as a loop over trials in a process that already shares
            assert again is shared
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    monkeypatch.setattr(ProcessFolder, "current", None)  # as in another process
    with shared_compiles() as other:
        assert other.place != shared.place
        assert {path.name for path in other.place.rglob("*") if path.is_file()} == {"one", "alive"}
        assert other.keep() == 0
    (entry,) = process_folder.compiled_store().entries()
    assert entry.uses == 1


def test_what_was_kept_for_another_model_is_not_taken_up(home, monkeypatch):
    from torch import nn

    narrow, wide = nn.Linear(2, 2), nn.Linear(2, 3)
    for model, name in ((narrow, "narrow"), (wide, "wide")):
        with shared_compiles(model) as shared:
            (shared.place / name).write_bytes(name.encode())
    monkeypatch.setattr(ProcessFolder, "current", None)
    with shared_compiles(narrow) as other:
        assert {path.name for path in other.place.iterdir()} == {"narrow", "alive"}
        with shared_compiles(wide):
            assert {path.name for path in other.place.iterdir()} == {"narrow", "wide", "alive"}
    assert [sorted(entry.manifest.models.values()) for entry in process_folder.compiled_store().entries()] == [
        ["Linear"]
    ] * 2


def test_what_is_compiled_after_a_keep_belongs_to_the_models_of_the_block_as_well(home):
    from torch import nn

    outer, inner = nn.Linear(2, 2), nn.Conv1d(2, 2, 1)
    with shared_compiles(outer) as shared:
        (shared.place / "before").write_bytes(b"1")
        assert shared.keep() == 1
        with shared_compiles(inner):
            (shared.place / "within").write_bytes(b"2")
        (shared.place / "after").write_bytes(b"3")
    kept = {entry.manifest.files[0].path: entry.manifest.models for entry in process_folder.compiled_store().entries()}
    names = {path: sorted(models.values()) for path, models in kept.items()}
    assert names == {"before": ["Linear"], "within": ["Conv1d", "Linear"], "after": ["Linear"]}


def test_generated_code_is_not_the_users(home):
    from hotloop._torch.graphs import is_user_file

    assert is_user_file(__file__)  # what is asked before the first block must not settle what is asked in it
    with shared_compiles() as shared:
        assert not is_user_file(str(shared.place / "ab" / "cabc.py"))


def test_no_more_is_taken_up_than_a_process_may_want(store, place, monkeypatch):
    monkeypatch.setattr(compiled, "MOST_TAKEN_BYTES", 250)
    put(store, {"first": bytes(200)})
    put(store, {"second": bytes(200)})
    assert len(taken(store, place)) == 1


def test_a_folder_that_the_user_chose_is_left_alone(home, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "chosen"))
    with shared_compiles() as shared:
        assert shared is None
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "chosen")


def test_torchs_own_folder_is_not_the_users_choice(home, monkeypatch):
    own = f"{tempfile.gettempdir()}/torchinductor_somebody"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", own)  # as torch itself sets it at its first compile
    with shared_compiles() as shared:
        assert shared is not None
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == own


def test_with_no_folder_nothing_is_shared_or_changed(home, monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", "")
    with shared_compiles() as shared:
        assert shared is None
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


def test_a_store_that_cannot_be_written_ends_no_run_and_is_said_once(home, caplog):
    home.write_text("a file")
    with shared_compiles() as shared:
        (shared.place / "one").write_bytes(b"1")
        assert shared.keep() == shared.keep() == 0
    assert len([one for one in caplog.records if "cannot be kept" in one.message]) == 1


def test_the_folders_of_killed_processes_are_removed_and_those_of_living_ones_stay(home, monkeypatch):
    living = ProcessFolder(CompiledStore(home))
    dead = Path(tempfile.mkdtemp(prefix="hotloop-compiled-"))
    (dead / "cx").mkdir()
    (dead / "cx" / "library.so").write_bytes(b"half")
    for place in (living.place, dead):
        os.utime(place, (1e9, 1e9))
    with shared_compiles():
        assert not dead.exists()
        assert living.place.exists()
    living._end()


def test_what_torch_is_writing_just_now_is_no_trouble(tmp_path):
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a.lock").write_bytes(b"")
    (tmp_path / "entry").write_bytes(b"x")
    assert [file.path for file, _ in files_in(tmp_path, ())] == ["entry"]


def library(sections=b"\0" * 64 * 3, name=b""):
    """Make a shared library of nothing but a header, a name, and its table of sections at the end."""
    body = name.ljust(64)
    head = struct.pack("<4sBB10x24xQ10xHHH", b"\x7fELF", 2, 1, 64 + len(body), 64, 3, 0)
    return head + body + sections


@pytest.mark.parametrize("content", [library()[:-1], library()[:100], library()[:20], b"", bytes(5000)], ids=range(5))
def test_a_library_that_a_linker_has_not_ended_is_not_kept(home, content):
    with shared_compiles() as shared:
        (shared.place / "whole.main.so").write_bytes(library())
        (shared.place / "half.main.so").write_bytes(content)
    ((file,),) = [entry.manifest.files for entry in process_folder.compiled_store().entries()]
    assert file.path == "whole.main.so"


def test_this_systems_own_libraries_are_whole_and_cut_ones_are_not():
    content = Path(torch._C.__file__).read_bytes()
    if not content.startswith(b"\x7fELF"):
        pytest.skip("other libraries than those of ELF")
    assert torch_files.is_whole_library(content)
    assert not torch_files.is_whole_library(content[: len(content) // 2])


def compiled_library(path, name):
    """Compile a library with one function, as torch compiles its probes."""
    compiler = shutil.which("g++") or pytest.skip("no compiler")
    command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", path]
    subprocess.run(command, input=f'extern "C" void {name}() {{}}'.encode(), check=True)


def test_the_libraries_that_ask_what_the_processor_can_do_are_kept_if_they_load(home, monkeypatch):
    tried = []
    run = subprocess.run
    monkeypatch.setattr(torch_files.subprocess, "run", lambda *args, **more: tried.append(args) or run(*args, **more))
    with shared_compiles() as shared:
        compiled_library(shared.place / "sound.so", "__avx_chk_kernel")
        tried.clear()
        (shared.place / "broken.so").write_bytes(library(name=b"__avx512_chk_kernel"))
        assert [shared.keep() for _ in range(3)] == [1, 0, 0]
        assert len(tried) == 1  # both in one process, and never again
    ((file,),) = [entry.manifest.files for entry in process_folder.compiled_store().entries()]
    assert file.path == "sound.so"


@pytest.mark.parametrize("trouble", [OSError("no process"), subprocess.TimeoutExpired("python", 60)])
def test_a_library_that_cannot_be_tried_is_not_kept(home, monkeypatch, trouble):
    def fails(*_, **__):
        raise trouble

    with shared_compiles() as shared:
        compiled_library(shared.place / "sound.so", "__avx_chk_kernel")
        monkeypatch.setattr(torch_files.subprocess, "run", fails)
        assert shared.keep() == 0

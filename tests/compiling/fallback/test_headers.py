"""A precompiled header that a killed compiler left half-written is a miss: removed, said, and compiled without."""

import logging
import subprocess
from pathlib import Path

import pytest
import torch
from compiling_models import Net, against_eager, one, real_aot_eager, rows
from torch import nn

import hotloop
from hotloop._torch import backends
from hotloop.compiling.fallback import headers

STEPS = [rows(seed=s) for s in range(3)]
SAID = [
    b"<command-line>: fatal error: cannot read PCH file: No such file or directory",
    b"cc1plus: error: while reading precompiled header: No such file or directory",
    b"fatal error: file 'a.h.pch' is not a valid precompiled PCH file",
]


@pytest.fixture
def header(tmp_path):
    """A header in a folder as torch's, with what was precompiled of it."""
    folder = tmp_path / "precompiled_headers"
    folder.mkdir()
    found = folder / "c123.h"
    found.write_text("#include <vector>\n")
    (folder / "c123.h.gch").write_bytes(b"gpch")
    return found


def failing(header, said):
    """What torch raises where a compiler fails."""
    command = ["g++", "/tmp/x.main.cpp", "-O3", "-include", str(header), "-o", "/tmp/x.so"]
    error = RuntimeError("C++ compile error")
    error.__cause__ = subprocess.CalledProcessError(1, command, output=said)
    return error


@pytest.mark.parametrize("said", SAID)
def test_it_is_removed_and_said(header, caplog, said):
    with caplog.at_level(logging.WARNING, "hotloop"):
        assert headers.removed(failing(header, said))
    assert sorted(path.name for path in header.parent.iterdir()) == ["c123.h"]
    assert "c123.h.gch is broken and was removed" in caplog.text
    assert not headers.removed(failing(header, said))  # so that nothing is compiled a third time


def test_any_other_failure_leaves_it_alone(header, tmp_path):
    assert not headers.removed(failing(header, b"x.main.cpp:3: error: 'vec' was not declared in this scope"))
    assert not headers.removed(failing(header, None))
    assert not headers.removed(RuntimeError("cannot read PCH file"))
    mine = tmp_path / "mine.h"
    (tmp_path / "mine.h.gch").write_bytes(b"gpch")
    assert not headers.removed(failing(mine, SAID[0]))  # a folder that is not torch's
    assert (header.parent / "c123.h.gch").exists()
    assert (tmp_path / "mine.h.gch").exists()


def test_the_graph_is_compiled_once_more(header, monkeypatch):
    asked = []

    def once(graph, inputs):
        asked.append(1)
        if len(asked) == 1:
            raise failing(header, SAID[0])
        return real_aot_eager()(graph, inputs)

    monkeypatch.setattr(backends, "aot_eager", lambda: once)
    with hotloop.watch() as events:
        status = against_eager(Net(), STEPS)
    assert (status.state, status.running, len(asked)) == ("compiled", "aot_eager", 2)
    assert not [event for event in events if type(event).__name__ == "Fallback"]


def test_where_torch_keeps_its_libraries_elsewhere_nothing_is_tried_again(header, monkeypatch):
    def missing():
        raise headers.CapabilityMissingError("planted")

    monkeypatch.setattr(headers, "forget_failed_libraries", missing)
    assert not headers.removed(failing(header, SAID[0]))
    assert not (header.parent / "c123.h.gch").exists()


@pytest.mark.campaign
@pytest.mark.inductor
def test_a_half_written_one_of_torchs_own_costs_no_compile(tmp_path, monkeypatch):
    from torch._inductor import codecache, config, cpu_vec_isa

    if not config.cpp_cache_precompile_headers:
        pytest.skip("this torch precompiles no headers here")
    torch._dynamo.reset()
    made = codecache._precompile_header.__wrapped__
    cut = []

    def killed(*args, **more):
        header = Path(made(*args, **more))
        for path in header.parent.glob(f"{header.name}.*ch"):
            if not cut:
                with path.open("r+b") as file:
                    file.truncate(path.stat().st_size // 3)
                cut.append(path)
        return str(header)

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)  # finding out takes longer than all the rest
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path / "precompiled_headers"))
    monkeypatch.setattr(codecache, "_HEADER_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setattr(codecache, "_precompile_header", killed)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    hotloop.compile(model, "inductor")
    model(rows())
    assert cut
    assert one(model).running == "inductor"
    assert one(model).state == "compiled"

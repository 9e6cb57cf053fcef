"""Torch's precompiled header is built where a kernel is compiled, and not where its library is there."""

import pytest
from torch._inductor import codecache

from hotloop._torch import ledger
from hotloop.cache import headers

pytestmark = pytest.mark.skipif(not hasattr(codecache, "_precompile_header"), reason="a torch that builds none")


@pytest.fixture
def built(monkeypatch):
    """Stand in for what builds a header; gives the headers that were built."""
    found = []
    ledger._look_up.cache_clear()
    monkeypatch.setattr(codecache, "_precompile_header", lambda header, *_, **__: found.append(header) or "built.h")
    yield found
    ledger._look_up.cache_clear()


def load(main_path):
    """Ask for the header as torch does that loads a kernel."""
    return codecache._precompile_header("prefix.h", "command", min_optimize=False)


@pytest.mark.parametrize("kept", [True, False])
def test_the_header_is_built_for_a_kernel_that_is_compiled_alone(built, tmp_path, kept):
    source = tmp_path / "ckernel.main.cpp"
    if kept:
        (tmp_path / "ckernel.main.so").touch()
    with headers.built_as_needed():
        header = load(str(source))
    assert (header, built) == (("prefix.h", []) if kept else ("built.h", ["prefix.h"]))


def test_the_header_is_built_where_torch_does_not_say_for_which_kernel(built):
    with headers.built_as_needed():
        assert codecache._precompile_header("prefix.h", "command") == "built.h"
    assert codecache._precompile_header.__name__ == "<lambda>"  # put back


@pytest.mark.inductor
@pytest.mark.campaign
@pytest.mark.long
def test_a_process_whose_kernels_are_kept_builds_no_header(tmp_path):
    import os
    import subprocess
    import sys

    program = (
        "import torch; from torch._inductor import codecache; from hotloop.cache import shared_compiles\n"
        "built, build = [], codecache._precompile_header\n"
        "codecache._precompile_header = lambda *a, **k: (built.append(a), build(*a, **k))[1]\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())\n"
        "with shared_compiles(model):\n"
        "    torch.compile(model)(torch.ones(4, 8)).sum().backward()\n"
        "print(len(built))\n"
    )
    own = {**os.environ, "HOTLOOP_CACHE_DIR": str(tmp_path / "cache")}
    own.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch names its folder there, once it is imported
    counts = []
    for place in ("one", "other"):
        (tmp_path / place).mkdir()
        own["TMPDIR"] = str(tmp_path / place)
        done = subprocess.run([sys.executable, "-c", program], env=own, check=True, capture_output=True, text=True)
        counts.append(int(done.stdout))
    assert counts[0] > 0
    assert counts[1] == 0

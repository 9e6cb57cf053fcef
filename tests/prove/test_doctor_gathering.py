"""The facts of this machine; a child that crashes or hangs is an answer."""

import os
import sys
from pathlib import Path

import pytest
from shared import is_gone, once

import hotloop
from hotloop.prove.doctor import gathering
from hotloop.prove.doctor.gathering import ask
from hotloop.prove.doctor.judging import judge

SOURCE = str(Path(hotloop.__file__).parents[1])
posix = pytest.mark.skipif(os.name == "nt", reason="permissions and signals of POSIX")


@pytest.fixture(scope="module")
def machine():
    return gathering.gather(trials=False)


@pytest.mark.campaign
def test_this_machine_is_known(machine):
    import torch

    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert machine.torch.version == torch.__version__
    assert not machine.torch.error
    assert machine.torch.threads == torch.get_num_threads()
    assert machine.cpus >= 1
    assert "cpu" in machine.torch.missing
    lacking = set() if version >= (2, 13) else {"torch._C:_override_stale_capture_stream", "torch:_foreach_clone"}
    assert set(machine.torch.capabilities) == lacking
    assert machine.cache.free_bytes > 0
    assert machine.trials == ()
    assert judge(machine)


def test_a_torch_that_breaks_at_import_is_a_finding(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), SOURCE]))
    found = gathering.gather()
    assert found.torch.error == "ImportError: libcudart.so.13: cannot open"
    assert found.trials == ()
    assert "libcudart" in judge(found)[0].what


@pytest.mark.campaign
def test_without_a_compiler_no_trial_is_made_and_the_presets_know(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = gathering.gather()
    assert found.compiler == ""
    assert found.trials == ()
    assert "C++ compiler" in found.torch.missing["cpu"]["default"]
    assert [one.topic for one in judge(found) if one.level == "problem"] == ["compiler"]


@posix
def test_a_child_that_crashes_hangs_or_talks():
    assert "signal SIGSEGV" in ask(["-c", "import os; os.kill(os.getpid(), 11)"], limit_s=300).error
    assert ask(["-c", "import time; time.sleep(600)"], limit_s=0.5).error == "no answer after 0 s"
    assert ask(["-c", "print('hello'); print('{\"a\": 1}')"], limit_s=300).data == {"a": 1}
    assert ask(["-c", "print('hello')"], limit_s=300).error == "it ended with exit code 0 and said nothing"
    assert ask(["-c", "raise KeyError('x')"], limit_s=300).error == "KeyError: 'x'"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_what_a_child_starts_ends_with_it(tmp_path):
    program = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); print('{\"pid\": %d}' % p.pid)"
    )
    pid = ask(["-c", program], limit_s=300).data["pid"]
    once(lambda: is_gone(pid))  # a killed process takes a moment to go


@pytest.mark.campaign
@pytest.mark.inductor
def test_three_lines_are_compiled_in_an_empty_cache_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # judged on its own: a trial does without
    trial = gathering.try_compile("cpu")
    assert (trial.device, trial.reason) == ("cpu", "")
    assert trial.seconds > 0
    assert not any(tmp_path.iterdir())


@pytest.mark.campaign
def test_a_trial_that_fails_says_why(monkeypatch):
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-there")
    trial = gathering.try_compile("cpu")
    assert "InvalidCxxCompiler" in trial.reason
    assert "C++ compiler" in trial.hint


@posix
def test_who_may_write_a_cache(tmp_path):
    home = tmp_path / "cache"
    home.mkdir(mode=0o700)
    found = gathering.folder(home, chosen=True)
    assert (found.mine, found.open_to, found.writable, found.exists) == (True, "", True, True)
    home.chmod(0o777)
    assert gathering.folder(home, chosen=True).open_to == "everybody"
    home.chmod(0o1777)
    assert gathering.folder(home, chosen=True).open_to == "everybody"  # the sticky bit keeps nobody from adding files
    home.chmod(0o700)
    tmp_path.chmod(0o777)  # then somebody may put another folder in its place
    assert gathering.folder(home, chosen=True).open_to == "everybody"
    assert gathering.folder(home / "not" / "there", chosen=True).exists is False
    tmp_path.chmod(0o700)
    other = tmp_path / "other"
    other.mkdir()
    if os.getuid() == 0:
        os.chown(other, 65534, 65534)
        assert gathering.folder(other, chosen=True).mine is False


def test_the_cache_is_where_torch_puts_it(monkeypatch, tmp_path):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert str(gathering.cache_path()) == default_cache_dir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert gathering.cache_path() == tmp_path / "mine"
    assert not (tmp_path / "mine").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_this_machines_memory_is_known(machine):
    assert 0 < machine.available_bytes <= machine.memory_bytes

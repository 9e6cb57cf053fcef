"""What all tests share: nothing compiled in one test is left to the next."""

from __future__ import annotations

import collections
import contextlib
import gc
import hashlib
import os
import sys

import pytest

_THIRD_PARTY = (
    # dynamo looks at .grad of every tensor that it traces, and gives a function up where the warning is an error.
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    # dynamo makes an instance of a user's autograd.Function to trace its forward.
    "ignore:<class 'torch.autograd.function.Function'> should not be instantiated:DeprecationWarning",
    # Inductor imports modules of torch's own that still script.
    "ignore:`torch.jit.script:DeprecationWarning",
    # A planted failure must not be answered from Inductor's cache, and torch says that its caches are off.
    "ignore:dynamo_pgo force disabled:UserWarning",
)

# Two workers whose operations each wait for two threads take turns at the cores: one test took 27 s so instead of 1.3.
# Whoever runs pytest without `make` gets it as well, and so do the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# At its first kernel torch compiles and loads, in each new cache and process, a probe for each vector unit that the CPU
# names: 20 s of the C++ compiler in an empty cache. Each compiler that takes torch's C++20 knows these units.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Where Python is told to write no bytecode, each process that a test starts compiles hotloop's modules anew, for 1.5 s of
# its CPU, and pytest rewrites each file of tests in each of its workers.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


# A busy machine is slow at whatever it does; that says nothing about a strategy. tests/gpu run without hypothesis, too.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("suite")


def pytest_configure(config):
    for line in _THIRD_PARTY:
        config.addinivalue_line("filterwarnings", line)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """Leave to `make test-long` what `some_of` leaves out: each time the same parameters, and of each axis some."""
    sampled = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("some_of"):
            device = bool(item.get_closest_marker("gpu"))
            sampled[item.nodeid.partition("[")[0], device].append(item)
    for group in sampled.values():
        (share,) = group[0].get_closest_marker("some_of").args
        group.sort(key=lambda item: hashlib.sha256(item.name.encode()).digest())
        for item in group[max(1, len(group) // share) :]:
            item.add_marker(pytest.mark.campaign)
            item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True)
def _where_it_was():
    """Fail a test that leaves another working directory: what it left there would be imported by later processes."""
    before = os.getcwd()  # noqa: PTH109 - Path makes 20 us of it
    yield
    left = os.getcwd()  # noqa: PTH109
    os.chdir(before)
    assert left == before, "the test changed the working directory"


_imported = 0


@pytest.fixture(autouse=True)
def _short_collections():
    """Keep what was imported out of later collections: a million objects, and tests and libraries collect often.

    An audit also looks through all objects, for functions that nothing else leads to.
    """
    global _imported
    if len(sys.modules) > _imported:
        gc.collect()
        gc.freeze()
        gc.collect()  # Python waits with the next full one until there are a quarter more than the last one left
        _imported = len(sys.modules)


# A trace makes and drops tens of thousands of objects, and Python looks through the young ones after every 700.
gc.set_threshold(10_000)


@pytest.fixture(autouse=True)
def _torchs_settings():
    """Fail a test that leaves a setting of torch's changed: tests after it in its process compute other last bits."""
    settings = sys.modules.get("hotloop.cache.ambient")
    before = settings and settings.torch_settings()
    yield
    if before:
        after = settings.torch_settings()
        settings.apply_process_settings(before)
        same = {"ieee": "none"}  # what `set_float32_matmul_precision("highest")` leaves where nothing was set
        assert {name: same.get(value, value) for name, value in after.items()} == {
            name: same.get(value, value) for name, value in before.items()
        }


@pytest.fixture(autouse=True)
def _guards_are_not_timed():
    """After each compile dynamo empties the CPU's caches to time its guards once, for its log: a twentieth of the suite."""
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Forget compiled code, shared roots and what was said, after each test that may have made any."""
    yield
    if "torch._dynamo" in sys.modules:
        import torch

        torch.compiler.reset()
    if "hotloop.compiling.control" in sys.modules:
        from hotloop.compiling.apply import roots

        roots.forget_roots()
    if "hotloop.step" in sys.modules:
        from hotloop.step.policy import history

        history.forget()

"""Silent wrong results of torch.compile that were reported upstream: `verify`, the proof and the sentinel find each.

Planted: `aot_eager` computes what the report says, on any torch and CPU. Real: Inductor's own code, on a torch that has
the bug, which one comparison without hotloop tells. docs/evidence/miscompiles.md has the table.
"""

from __future__ import annotations

import contextlib
import threading

import miscompile_programs as programs
import pytest
import torch
from miscompile_programs import Trained, checked_every, compiled_wrongly, faults_of, planted, workload

import hotloop
from hotloop import events as ev

PLANTED = {
    193061: programs.Modulated,
    182012: programs.Diagonal,
    180772: programs.Sliced,
    185382: programs.Scheduled,
    196468: programs.OverQueries,
    197888: programs.Volume,
}
# With the versions of torch whose compiled code was seen wrong on a CPU, of 2.11.0, 2.13.0, 2.14.1 and 2.15.0.
REAL = {
    182012: (programs.Diagonal, "2.11"),
    180772: (programs.Sliced, "2.11"),
    185382: (programs.Moments, "2.13 2.14"),
    194976: (programs.Clamped, "2.13"),
    196468: (programs.OverQueries, "2.11 2.13 2.14"),
    197888: (programs.Volume, "2.13 2.14"),
    190758: (programs.Dropped, "2.11 2.13 2.14 2.15"),
    180642: (programs.InPlace, "2.11"),
}
PERIOD = 4
pytestmark = pytest.mark.filterwarnings("ignore:`torch._prims_common.check`:FutureWarning")  # Inductor, of itself


def same(run, other):
    return all(torch.equal(one, two) for one, two in zip(run.left().values(), other.left().values(), strict=True))


def of_threads(parts):
    return pytest.mark.parametrize("part", [pytest.param(part, id=str(number)) for number, part in parts.items()])


@pytest.mark.campaign
@of_threads(PLANTED)
def test_verify_names_the_region_of_a_planted_one(part):
    with planted(faults_of(part)) as wrong:
        verdict = hotloop.verify(workload(part), "aot_eager")
    assert wrong
    assert not verdict.passes
    assert [one.path for one in verdict.blamed.regions] == ["model.part"]


@pytest.mark.campaign
@of_threads(PLANTED)
def test_the_same_programs_pass_where_nothing_is_planted(part):
    """The control: what is found above is what was planted."""
    assert hotloop.verify(workload(part), "aot_eager").passes


def proven_by(part):
    """Return a step by which a tier is proven: where a number is new at each step, steps are eager until 40 were."""
    return 50 if part in (programs.Scheduled, programs.Clamped) else 14


@of_threads(PLANTED)
def test_the_proof_declines_a_planted_one_and_the_run_is_eagers(part):
    steps = proven_by(part)
    with planted(faults_of(part)) as wrong:
        run = Trained(part, "aot_eager", steps=steps)
    assert wrong
    (declined,) = run.told(ev.TierDeclined)
    assert "compiled code does not agree with eager" in declined.reason
    assert run.loop.status().tier == "eager"
    assert same(run, Trained(part, steps=steps))


@pytest.mark.campaign
@of_threads(PLANTED)
@pytest.mark.some_of(2)
def test_the_sentinel_finds_a_planted_one_that_comes_later(part):
    faults, start = faults_of(part), proven_by(part)

    def goes_wrong(step):
        for fault in faults:
            fault.on = step >= start

    with planted(faults), checked_every(PERIOD):
        run = Trained(part, "aot_eager", steps=start + 30, before=goes_wrong)
    (told,) = run.told(ev.SentinelDisagreed)
    assert start <= told.step <= start + PERIOD + 9  # a check, and up to nine more that confirm it
    assert run.loop.status().tier == "eager"


@contextlib.contextmanager
def memory_halved(part):
    """Let torch's partitioner keep half of what a backward pass of this part needs, as its users ask it to."""
    from torch._functorch import config

    with config.patch(activation_memory_budget=0.5) if part is programs.Dropped else contextlib.nullcontext():
        yield


def preset_of(part):
    """Return the cheapest preset that has the bug: two are in the tracing, not in the kernels."""
    return "aot_eager" if part in (programs.Dropped, programs.InPlace) else "default"


@pytest.fixture
def real(request):
    """A part that this torch compiles wrongly; the preset that does."""
    number = request.param
    part, wrong = REAL[number]
    with memory_halved(part):
        if not compiled_wrongly(part, {"default": "inductor"}.get(preset_of(part), preset_of(part))):
            seen = ", ".join(wrong.split())
            pytest.skip(f"pytorch#{number}: torch {torch.__version__} compiles it rightly here; seen wrong with {seen}")
        yield part, preset_of(part)


of_real = pytest.mark.parametrize("real", REAL, ids=str, indirect=True)


@pytest.mark.campaign
@of_real
def test_verify_names_the_region_of_a_real_one(real):
    part, preset = real
    verdict = hotloop.verify(workload(part), preset)
    assert not verdict.passes
    if part is programs.Dropped:  # the backward pass draws once more, which no module's output shows
        assert "another position of" in verdict.why
    else:
        assert [one.path for one in verdict.blamed.regions] == ["model.part"]


@pytest.mark.campaign
@of_real
def test_the_proof_declines_a_real_one_and_the_run_is_eagers(real):
    part, preset = real
    steps = proven_by(part)
    run = Trained(part, preset, steps=steps)
    (declined,) = run.told(ev.TierDeclined)
    assert "compiled code does not agree with eager" in declined.reason
    assert run.loop.status().tier == "eager"
    assert same(run, Trained(part, steps=steps))


def test_other_random_numbers_are_told_as_a_bug_also_where_a_thread_is_alive():
    """Inductor's own threads stay alive after a compile, so that the program was told to have them draw elsewhere."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        with memory_halved(programs.Dropped):
            run = Trained(programs.Dropped, "aot_eager", steps=proven_by(programs.Dropped))
    finally:
        over.set()
        thread.join()
    (declined,) = run.told(ev.TierDeclined)
    assert "another position of torch's CPU generator" in declined.reason
    assert "where another thread draws" in declined.hint
    assert "report it: this is a bug of the compiler's or of ours" in declined.hint

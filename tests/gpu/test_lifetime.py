"""The table of programs on real CUDA graphs: what the emulation flags goes wrong there, and what it passes is right.

Set HOTLOOP_LIFETIME_TABLE to an empty folder, and the outcomes are written there: a file each, since several processes
may share the tests, and all of them together as JSON and as a table for the docs.
"""

import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hotloop
from hotloop import events as ev
from hotloop.errors import StaleOutputError

sys.path.insert(0, str(Path(__file__).parents[1] / "testing"))
from lifetime_cases import CASES
from lifetime_programs import Net, World, Writes
from two_networks import PICKS, Ranker, allocate, batches, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # Inductor suggests TF32 on such a card, and uses deprecated parts of torch: an error there would break a lowering.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
PRESET = "reduce-overhead"
WARM = (0, 4)
"""Clean steps before a program: none, so that it is warm-up and recording; and enough for replays."""
KINDS = {0: "recording", 4: "replay"}
RAISES = "raises"
TORCHS = (
    "overwritten by a subsequent run",  # while it records
    "graph recording observed an input tensor deallocate",
    "are not allocated in pool",
)
"""What torch says where it notices by itself; after the latter two its allocator is not sound any more."""
ABORTS = "aborts"
UNSOUND = "invalid device pointer"
"""What its allocator says as it ends the process, when it gives memory back that is no longer its own: torch raised
in the middle of a graph, and nobody can catch what a destructor raises."""


@pytest.fixture(autouse=True)
def _fresh_graphs():
    yield
    gc.collect()
    torch._inductor.cudagraph_trees.reset_cudagraph_trees()


@pytest.fixture(scope="module", autouse=True)
def _table():
    yield
    if folder := os.environ.get("HOTLOOP_LIFETIME_TABLE"):
        write_table(Path(folder))


def write_table(folder):
    """Put together what is there by now; the process that ends last finds all of it."""
    rows = []
    for case in CASES:
        found = {path.stem: path.read_text() for path in sorted((folder / "outcomes" / case.name).glob("*"))}
        if found:
            rows.append(
                {"case": case.name, "emulation": "flagged" if case.flagged else "passed", **found, "why": case.why}
            )
    device = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    replace(folder / "lifetime.json", json.dumps({**device, "cases": rows}, indent=1) + "\n")
    columns = [f"{who} {kind}" for who in ("torch", "hotloop") for kind in KINDS.values()]
    heads = ("case", "emulation", *columns, "why")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(row.get(head, "") for head in heads) + " |" for row in rows]
    replace(folder / "lifetime.md", "\n".join(lines) + "\n")


def replace(path, text):
    """Write a file as a whole, also where another process does so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def note(case, who, warm, found):
    if folder := os.environ.get("HOTLOOP_LIFETIME_TABLE"):
        replace(Path(folder, "outcomes", case.name, f"{who} {KINDS[warm]}"), found)


def outcome(case, compiler, warm, expected, torchs=TORCHS[:1]):
    """Run a program and say what became of it: ``right``, ``wrong values``, or ``raises: `` and the words.

    ``torchs`` are words of errors of torch's own that count as a clear answer.
    """
    try:
        found = case.program(World(compiler, "cuda", warm))
    except StaleOutputError as error:
        return f"{RAISES}: {error}"
    except RuntimeError as error:
        if not any(words in str(error) for words in torchs):
            raise
        return f"{RAISES}: {error}"
    close = all(abs(one - other) <= 1e-3 * max(1.0, abs(other)) for one, other in zip(found, expected, strict=True))
    return "right" if close else "wrong values"


def plain(case, warm):
    """Run a program under plain ``torch.compile`` and say what became of it."""
    expected = case.program(World(lambda module: module, "cuda", warm))
    torch.compiler.reset()
    with torch._functorch.config.patch(donated_buffer=False):  # else torch refuses to keep a graph
        return outcome(case, lambda module: torch.compile(module, mode=PRESET), warm, expected, TORCHS)


def plain_alone(case, warm):
    """The same in a process of its own, which torch's error may leave unsound, or end: ``aborts: `` and the words."""
    code = (
        f"import os, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_lifetime as tests; "
        f"case = next(one for one in tests.CASES if one.name == {case.name!r}); "
        f"print('OUTCOME', tests.plain(case, {warm}).splitlines()[0], flush=True); os._exit(0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    said = [line for line in ran.stdout.splitlines() if line.startswith("OUTCOME ")]
    if not said and ran.returncode == -signal.SIGABRT and UNSOUND in ran.stderr:
        return f"{ABORTS}: {UNSOUND}"
    assert said, ran.stdout + ran.stderr
    return said[-1].removeprefix("OUTCOME ")


@EVERY
def test_what_the_emulation_flags_goes_wrong_on_the_gpu_and_what_it_passes_is_right(case):
    found = {}
    for warm in WARM:
        found[warm] = (plain_alone if case.dies else plain)(case, warm)
        note(case, "torch", warm, found[warm].partition(":")[0])
    if case.flagged:
        assert set(found.values()) != {"right"}
    else:
        assert set(found.values()) == {"right"}


@EVERY
@pytest.mark.parametrize("warm", WARM)
def test_hotloops_compile_is_right_by_default(case, warm):
    expected = case.program(World(lambda module: module, "cuda", warm))
    found = outcome(case, lambda module: hotloop.compile(module, PRESET), warm, expected)
    note(case, "hotloop", warm, found.partition(":")[0])
    assert found.partition(":")[0] == case.hotloop, found


def test_kept_graphs_run_outside_of_cuda_graphs_in_every_step_and_others_in_them():
    """Three backwards of one forward, again and again: right, and replayed where no graph is kept."""
    model, twin = Net().cuda(), Net().cuda()
    hotloop.compile(model, PRESET)
    for step in range(8):
        for each in (model, twin):
            given = torch.randn(33, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
            odd = given.flatten()[1:-7].view(32, 8).requires_grad_()  # its address suits no vector instruction
            loss = each(odd).square().sum()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=step % 2 == 0)
            if step % 2 == 0:
                loss.backward()
            each.seen = [odd.grad.clone(), *(parameter.grad.clone() for parameter in each.parameters())]
            del loss, odd
            each.zero_grad()
        for one, other in zip(model.seen, twin.seen, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert any("keeps its graph" in reason for reason in hotloop.status(model).components["model"].cudagraphs_skipped)


def test_a_forward_that_is_never_gone_back_through_spoils_no_later_step():
    """It is given up after a while; replays must not hand out the tensors that it holds."""
    model, twin = Net().cuda(), Net().cuda()
    hotloop.compile(model, PRESET)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, twin)]
    kept = []
    for step in range(40):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            given = torch.randn(4, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
            if step in (5, 20) and each is model:
                kept.append(each(given))
            each(given).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for one in kept:
        with pytest.raises(StaleOutputError, match="marked between a forward and its backward"):
            one.sum().backward()


def test_a_graph_that_writes_into_its_input_is_skipped_with_a_reason():
    model = hotloop.compile(Writes().cuda(), PRESET)
    with torch.no_grad():
        for _ in range(3):
            model(torch.zeros(4, 8, device="cuda"))
    assert hotloop.status(model).components["model"].cudagraphs_skipped


def beside(compiled, eager, pairs):
    """Give a callable that asks both networks, which have the same parameters, and keeps what they gave."""

    def call(*args):
        pairs.append((compiled(*args), eager(*args)))
        return pairs[-1][0]

    return call


def lockstep(ranker, twin, given):
    """Train on the batches, each step beside an eager twin from the same parameters; give all pairs, never copied.

    Over many steps the two would drift apart, and rightly: the bias of the scores has a gradient of zero but for
    rounding, of which Adam makes steps of full size.
    """
    pairs, mine = [], ranker.optimizer.param_groups[0]["params"]
    theirs = twin.optimizer.param_groups[0]["params"]
    gist, lens = beside(ranker.gist, twin.gist, pairs), beside(ranker.lens, twin.lens, pairs)
    for items, chosen, target in given:
        losses = [
            torch.nn.functional.cross_entropy(each.lens(each.gist(items, chosen), items), target)
            for each in (ranker, twin)
        ]
        for loss in losses:
            loss.backward()
        pairs.append(tuple(losses))
        pairs += [(one.grad, other.grad) for one, other in zip(mine, theirs, strict=True)]  # held, and not copied
        ranker.optimizer.step()
        ranker.optimizer.zero_grad()
        twin.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(theirs, mine)
        allocate(gist, lens, items[:1])
    return pairs


def test_two_networks_train_a_thousand_steps_and_are_asked_in_between():
    """1,000 steps, four calls of each network between any two: captured, nothing compiled again, numbers as eager's.

    Every output and every gradient is held until the end: one that a later call overwrote would not be eager's.
    """
    steps = 1000
    before = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    ranker, twin = Ranker("cuda").compile(), Ranker("cuda")
    with hotloop.watch() as events:
        pairs = lockstep(ranker, twin, batches(steps, "cuda"))
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == before
    status = hotloop.status({"gist": ranker.gist, "lens": ranker.lens}).components
    for one in status.values():
        assert (one.state, one.running, one.causes, one.cudagraphs_skipped) == ("compiled", PRESET, (), ())
        assert one.modes["training"]["calls"] == steps
        assert one.modes["inference"]["calls_per_step"] == {"4": steps - 1}
    assert not [event for event in events if isinstance(event, ev.Recompiled)]
    assert len(pairs) == steps * (1 + len(ranker.optimizer.param_groups[0]["params"]) + 2 * PICKS)
    with torch.no_grad():
        apart = torch.stack([(one - other).abs().max() - 1e-4 * other.abs().max() for one, other in pairs])
        assert apart.isfinite().all()
        assert apart.max() <= 1e-5
        losses = torch.stack([one for one, _ in pairs if one.dim() == 0])
    assert losses[-100:].mean() < losses[:100].mean()


def test_memory_of_graphs_does_not_grow_with_the_steps():
    ranker = Ranker("cuda").compile()
    given = batches(4, "cuda")
    for _ in range(5):
        run(ranker, given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(50):
        run(ranker, given)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= before + 2**21

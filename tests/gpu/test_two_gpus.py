"""Two processes, a GPU each, through NCCL: what tests/step and tests/integrations show of two gloo processes on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "step" / "ranks"))
sys.path.append(str(Path(__file__).parents[1] / "integrations"))

from test_captured_ranks import (
    test_lightning_captures_in_two_processes,
    test_transformers_captures_in_two_processes,
    test_what_a_framework_shards_is_captured_in_two_processes,
)
from test_step_auto_peers import test_a_process_that_hangs_ends_the_others_once_its_collective_is_late
from test_step_killed import test_a_process_that_is_killed_ends_all
from test_step_peers import (
    PROGRAM,
    VOTES,
    started,
    test_ddp_compiles_and_falls_back_in_one_process_alone,
    test_fsdp1_compiles_what_it_wraps_and_is_left_alone_by_a_loop,
    test_fsdp2_compiles_in_place_and_falls_back_in_one_process_alone,
    test_processes_that_do_not_keep_pace_go_on_eager,
    test_shapes_that_vary_train_as_eager_and_groups_made_later_count,
    two_processes,
)

__all__ = [
    "test_a_process_that_hangs_ends_the_others_once_its_collective_is_late",
    "test_a_process_that_is_killed_ends_all",
    "test_ddp_compiles_and_falls_back_in_one_process_alone",
    "test_fsdp1_compiles_what_it_wraps_and_is_left_alone_by_a_loop",
    "test_fsdp2_compiles_in_place_and_falls_back_in_one_process_alone",
    "test_lightning_captures_in_two_processes",
    "test_processes_that_do_not_keep_pace_go_on_eager",
    "test_shapes_that_vary_train_as_eager_and_groups_made_later_count",
    "test_transformers_captures_in_two_processes",
    "test_what_a_framework_shards_is_captured_in_two_processes",
]
NCCL = {"PEERS_BACKEND": "nccl"}
TWO = 2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < TWO, reason="needs two GPUs of one host"),
    pytest.mark.xdist_group("two GPUs"),
]


@pytest.fixture(autouse=True, scope="module")
def _nccl():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEERS_BACKEND", "nccl")
        yield


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A process that loses a step ends, and its launcher then ends the other one, which waits for it in NCCL."""
    folder = tmp_path_factory.mktemp("ended")
    running = started(folder, "ddp-backward run", program=PROGRAM, **NCCL)
    lost = running[1].communicate(timeout=200)
    running[0].terminate()
    left = running[0].communicate(timeout=100)
    return [one.returncode for one in running], [left, lost], folder / "kept"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, ended):
    return two_processes(
        tmp_path_factory.mktemp("peers"), "resume-resume", "ddp-compile", "ddp-forward compile", "ddp-backward compile", "ddp-sleep",
        "ddp-short", "ddp-short-first", "ddp-anew", "local-forward run", "fsdp2-compile", "fsdp2-forward compile",
        "fsdp1-compile", "fsdp1-forward compile", "fsdp1-loop", KEPT=str(ended[2]), **NCCL,
    )  # fmt: skip


@pytest.fixture(scope="module")
def voted(tmp_path_factory):
    scenarios = "alone", "uneven", "closed", "late", "begun", "shapes"
    return two_processes(tmp_path_factory.mktemp("votes"), *scenarios, program=VOTES, **NCCL)


def test_a_run_that_fails_after_a_collective_ends_all_processes_and_is_resumed(ended, trained):
    codes, (_, (told, error)), _ = ended
    assert codes[1] == 1, error[-3000:]
    assert codes[0] != 0
    lost = json.loads(told.strip().splitlines()[-1])["ddp-backward run"]
    assert lost["raised"] == "StepLostError", lost
    assert "planted failure in backward run" in lost["message"], lost
    assert "checkpoint" in lost["message"], lost
    for one in trained:
        assert one["resume-resume"]["same"], one["resume-resume"]
        assert 0 < one["resume-resume"]["left"] < 14


_ACCELERATE = """
import gc, sys, torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from block_net import Net
from torch.nn import functional as F
import hotloop
from hotloop.integrations.accelerate import prepare
from fitting import small_batches

sharded, how = sys.argv[1] == "fsdp2", sys.argv[2]
found = []
for ours in (False, True):
    torch.compiler.reset()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=how == "checkpointing",
    ) if sharded else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    make = (lambda *given: prepare(accelerator, *given, preset="aot_eager")) if ours else accelerator.prepare
    model, optimizer = make(net, optimizer)
    losses = []
    for ids, labels in small_batches(12)[accelerator.process_index::2]:
        loss = F.cross_entropy(model(ids.to(accelerator.device)), labels.to(accelerator.device))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    found.append((losses, sorted(accelerator.get_state_dict(model))))
    (part,) = hotloop.status(model).components.values() if ours else (None,)
torch.testing.assert_close(*[torch.tensor(one[0]) for one in found], rtol=1e-4, atol=1e-5)
if accelerator.is_main_process:
    assert found[0][1] == found[1][1] and not any("_orig_mod" in name for name in found[1][1]), found
assert part.state == "compiled" and part.graph_breaks == 0, part
graphs = {"ddp": 6, "fsdp2": 12}[sys.argv[1]]  # one a step, or one for each of its two blocks
assert part.frames_compiled == graphs * (2 if how == "checkpointing" else 1), part  # a backward runs blocks again
sys.stdout.write(f"rank {accelerator.process_index} done\\n")
sys.stdout.flush()
del model, optimizer, net, loss
gc.collect()
accelerator.wait_for_everyone()
accelerator.end_training()
"""


@pytest.mark.parametrize(("kind", "how"), [("ddp", "plain"), ("fsdp2", "plain"), ("fsdp2", "checkpointing")])
def test_accelerate_prepares_compiled_and_sharded(tmp_path, kind, how):
    program = tmp_path / "two.py"
    program.write_text(_ACCELERATE)
    folders = os.pathsep.join([str(Path(__file__).parents[1] / "integrations"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": folders}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(program), kind, how],
        capture_output=True, text=True, check=False, timeout=240, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert sorted(line for line in done.stdout.splitlines() if "done" in line) == ["rank 0 done", "rank 1 done"]

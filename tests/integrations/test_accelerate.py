"""Accelerate: the promises of `prepare` beyond the conformance suite."""

import functools
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import hotloop
from hotloop import events as ev
from hotloop.integrations.accelerate import prepare
from hotloop.testing import captured_step_emulation


@pytest.fixture(autouse=True)
def _fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)  # a Trainer of another file leaves its own
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def small_gpt():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=8, use_cache=False, loss_type="ForCausalLM",
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(accelerator, model, optimizer, steps=2):
    for _ in range(steps):
        loss = F.cross_entropy(model(torch.ones(4, 4)), torch.arange(4) % 2)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss


def prepared(accelerator, model, **settings):
    return prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)


@pytest.mark.campaign
def test_a_dynamo_plugin_is_applied_once_and_by_hotloop(tmp_path):
    """Accelerate's own compile would leave ``_orig_mod.`` in the keys, and a model that ``eval()`` does not reach."""
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    given = small_gpt()
    model, optimizer = prepared(accelerator, given)
    assert model is given
    ids = torch.arange(16).view(2, 8)
    with hotloop.watch() as events:
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
    assert {one.component for one in events if isinstance(one, ev.Compiled)} == {"model"}
    (part,) = hotloop.status(model).components.values()
    assert (part.requested, part.state) == ("aot_eager", "compiled")
    assert part.regions != ("whole",)
    assert set(accelerator.get_state_dict(model)) == set(given.state_dict())
    accelerator.save_model(model, str(tmp_path))
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "_orig_mod" in name]
    model.eval()
    assert not given.training
    assert accelerator.state.dynamo_plugin.backend.value == "AOT_EAGER", "the user's setting is as it was"


@pytest.mark.parametrize("order", ["before", "after"])
def test_activation_checkpointing_before_and_after_prepare_is_inside_of_what_is_compiled(order):
    def checkpointed(model):
        apply_activation_checkpointing(model, check_fn=lambda one: isinstance(one, nn.Sequential))

    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model, accelerator = Net(), Accelerator(cpu=True)
        if order == "before":
            checkpointed(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepare_it = functools.partial(prepare, accelerator, preset="aot_eager") if ours else accelerator.prepare
        prepared_model, optimizer = prepare_it(model, optimizer)
        if order == "after":
            checkpointed(model)
        with hotloop.watch() as events:
            train(accelerator, prepared_model, optimizer, steps=3)
        found.append([one.detach() for one in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    part = hotloop.status(model).components["model"]
    assert (part.state, part.frames_compiled, part.causes) == ("compiled", 3, ())
    assert not [one for one in events if isinstance(one, ev.CheckpointOutside | ev.GraphBreak)]


def test_what_the_user_compiled_is_unwrapped_with_a_hint(caplog):
    accelerator = Accelerator(cpu=True)
    given = Net()
    model, optimizer = prepared(accelerator, torch.compile(given, backend="aot_eager"), preset="aot_eager")
    assert model is given
    assert "leave torch.compile out" in caplog.text
    train(accelerator, model, optimizer)
    assert hotloop.status(model).components["model"].state == "compiled"
    assert accelerator.unwrap_model(model) is given


def test_models_of_a_class_share_compiled_code_in_mixed_precision():
    compiles = []
    for _ in range(3):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model, optimizer = prepared(accelerator, Net(), preset="aot_eager")
        with hotloop.watch() as events:
            assert train(accelerator, model, optimizer).dtype == torch.float32
        compiles.append(len([one for one in events if isinstance(one, ev.Compiled)]))
        assert model(torch.ones(1, 4)).dtype == torch.float32, "outputs are float32, as Accelerate gives them"
        plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert plain(torch.ones(1, 4)).dtype == torch.float32
        AcceleratorState._reset_state(reset_partial_state=True)
    assert compiles == [1, 0, 0]


_TWO = """
import gc, sys, torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, {folder!r})
from test_accelerate import Net, prepared, train
import hotloop

def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    given = Net()
    model, optimizer = prepared(accelerator, given, preset="aot_eager")
    assert isinstance(model, DistributedDataParallel)
    loss = train(accelerator, model, optimizer, steps=3)
    part = hotloop.status(given).components["model"]
    assert part.state == "compiled", part
    assert part.frames_compiled == 3, part
    total = sum(float(one.detach().double().sum()) for one in given.parameters())
    totals = accelerator.gather(torch.tensor([total])).tolist()
    assert totals[0] == totals[1], totals
    assert set(accelerator.get_state_dict(model)) == set(given.state_dict())
    sys.stdout.write(f"rank {{accelerator.process_index}} done\\n")  # as one: what two processes print is mixed
    sys.stdout.flush()
    # Two gloo processes hang or abort at their exit now and then, unless what holds the group is gone before it is.
    del model, optimizer, given, loss, part
    gc.collect()
    accelerator.wait_for_everyone()
    accelerator.end_training()

main()
"""


@pytest.mark.campaign
def test_two_processes_train_alike_compiled_inside_of_ddp(tmp_path):
    program = tmp_path / "two.py"
    program.write_text(_TWO.format(folder=str(__file__).rpartition("/")[0]))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(program)],
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "done" in line) == ["rank 0 done", "rank 1 done"]


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
@pytest.mark.parametrize("overflow", [(20,), (0, 1, 4, 20, 21)], ids=str)
def test_a_schedule_waits_where_the_scaler_skipped_a_captured_step(overflow):
    """Accelerate's scheduler asks the optimizer whether its step was skipped; a replay has to tell it."""

    def train(run):
        torch.manual_seed(0)
        accelerator, model = Accelerator(cpu=True), Net()
        plain = torch.optim.AdamW(model.parameters(), lr=2**-6)
        scaler = accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
        optimizer = AcceleratedOptimizer(plain, scaler=scaler)
        schedule = torch.optim.lr_scheduler.LambdaLR(plain, lambda epoch: 1 / (1 + epoch))
        schedule = AcceleratedScheduler(schedule, optimizer)
        loop = hotloop.Loop(model, optimizer, state=scaler, run=run)

        @loop.step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        rates = []
        for number in range(28):
            x = torch.randn(6, 4)
            if number in overflow:
                x[0, 0] = float("inf")
            train_step(x, torch.arange(6) % 2)
            schedule.step()
            rates.append((schedule.get_last_lr(), scaler.get_scale(), bool(optimizer.step_was_skipped)))
        return rates, model.state_dict(), loop.status()

    rates, weights, _ = train("eager")
    with captured_step_emulation():
        ours, captured, status = train("eager+graph")
    assert status.tier == "eager+graph", status
    assert ours == rates
    torch.testing.assert_close(captured, weights, rtol=1e-5, atol=1e-6)

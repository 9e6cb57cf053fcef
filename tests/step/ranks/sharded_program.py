"""Processes whose sharded steps are captured together: ``python sharded_program.py STORE RANK SIZE SCENARIO...``.

Each scenario trains once eagerly and once with ``+graph`` on the CPU's emulation, and prints JSON of both. With
``PEERS_BACKEND=nccl`` each process has a GPU, which captures.
"""

import contextlib
import sys
import warnings

import torch
from auto_program import FASTER, TOTAL, paced
from captured_program import CAPTURES, DEVICE, RANK, SIZE, main
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

import hotloop
from hotloop._torch.sharded import shard_of
from hotloop.step.capture.in_and_out import Inputs
from hotloop.step.state import trial_run
from hotloop.testing.captured import Tape, TapeRecording

warnings.simplefilter("ignore")
STEPS = 60
_USUAL = 0.005
"""Python's switch interval, in seconds."""


class FlakyError(Exception):
    """What a program catches."""


class Net(nn.Module):
    """Three layers, whose parameters do not divide evenly: of the last layer's bias one process may hold nothing."""

    def __init__(self):
        super().__init__()
        self.first, self.drop = nn.Linear(6, 10), nn.Dropout(0.25)
        self.second, self.last, self.scale = nn.Linear(10, 5), nn.Linear(5, 1), 1.0

    def forward(self, x):
        return self.last(self.drop(self.second(self.first(x).relu()).relu())) * self.scale


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=2**-6, fused=True)  # a rate that is a float32: equal to the bit


class Recomputed(Net):
    """A network whose first layer is computed again in the backward, with the dropout of its forward."""

    def __init__(self):
        super().__init__()
        self.first = checkpoint_wrapper(nn.Sequential(self.first, self.drop))


def sharded(net=Net, **how):
    """Return the model, sharded by layers."""
    torch.manual_seed(0)
    model = net().to(DEVICE)
    for layer in (model.first, model.second):
        fully_shard(layer, **how)
    return fully_shard(model, **how)


def train(  # a scenario each
    run,
    *,
    made=sharded,
    by=adamw,
    sizes=None,
    between=None,
    inside=None,
    clear=None,
    clips=True,
    times=1,
    steps=STEPS,
    syncs=None,
    total=1000,
    sentinel=0.0,
    **settings,
):
    """Train; return the losses, the state, and the loop's status.

    Args:
        run: a tier.
        made: returns the model.
        by: returns the optimizer of its parameters.
        sizes: returns the number of rows of a step's batch.
        between: called before each step with its number, the model and the optimizer.
        inside: called in each step with the model, its output, and whether it is the last of the step.
        clear: how gradients are cleared; None to keep them in every second call.
        clips: clip gradients.
        times: backwards in each step.
        steps: how many.
        syncs: says whether a call reduces gradients, which the step itself switches off and on.
        total: steps that the loop is told of.
        sentinel: the share of time for checks; 0 for none, so that replays can be counted.
        settings: of the loop.
    """
    model = made()
    optimizer = by(model.parameters())
    loop = hotloop.Loop(model, optimizer, run=run, total_steps=total, sentinel=sentinel, **settings)
    clear = clear or (lambda one: one.zero_grad())

    @loop.step
    def step(x, y, update):
        losses = []
        for number in range(times):
            if inside is not None:
                inside(model, number == times - 1)
            if syncs is not None:
                model.set_requires_gradient_sync(syncs(update))
            loss = F.mse_loss(model(x * (number + 1)).float(), y)
            loss.backward()
            if syncs is not None:
                model.set_requires_gradient_sync(True)
            losses.append(loss.detach())
        if update:
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            clear(optimizer)
        if sys.getswitchinterval() > _USUAL:  # nothing of the program: no recording is dropped for it
            raise FlakyError
        return torch.stack(losses)

    draws = torch.Generator().manual_seed(RANK)
    torch.manual_seed(100 + RANK)
    losses, ran = [], []
    for number in range(steps):
        rows = sizes(number) if sizes is not None else 6
        x, y = torch.randn(rows, 6, generator=draws).to(DEVICE), torch.randn(rows, 1, generator=draws).to(DEVICE)
        if between is not None:
            between(number, model, optimizer)
        try:
            losses.append(step(x, y, update=ALWAYS or number % 2 == 1))
        except FlakyError:
            losses.append(torch.full((times,), 7.0, device=DEVICE))
        ran.append(loop.last_ran())
    status = loop.status()
    left = dict(model.state_dict())
    states = optimizer.state_dict()["state"].items()
    left |= {f"{name} {place}": torch.as_tensor(value) for place, state in states for name, value in state.items()}
    kinds = {name: type(value) for name, value in left.items()}
    left = {name: shard_of(value).clone() for name, value in left.items()}
    loop.close()
    return {"losses": torch.stack(losses), "left": left, "kinds": kinds, "status": status, "ran": ran}


ALWAYS = True
"""Each call updates; else every second one."""


def beside_eager(run="eager+graph", *, exactly=True, **how):
    """Train both ways; return what a test looks at."""
    eager = train("eager", **how)
    with CAPTURES():
        ours = train(run, **how)
    pairs = [(eager["losses"], ours["losses"]), *((value, ours["left"][name]) for name, value in eager["left"].items())]
    # A recording on a GPU has a capturable optimizer, which computes the same otherwise.
    far = (0.0, 0.0) if exactly and DEVICE.type == "cpu" else (1e-5, 1e-6) if DEVICE.type == "cpu" else (1e-4, 1e-5)
    ran = [tier for tier, _ in ours["ran"]]
    return {
        "same": all(torch.allclose(one, other, rtol=far[0], atol=far[1]) for one, other in pairs),
        "kinds": eager["kinds"] == ours["kinds"] and DTensor in eager["kinds"].values(),
        "tier": ours["status"].tier,
        "replays": sum((tier, what) == (run if run != "auto" else "eager+graph", "run") for tier, what in ours["ran"]),
        "last": ran[-1],
        "log": "".join(what[0] for _, what in ours["ran"]),
        "status": str(ours["status"]),
        "decided": list(ours["status"].decisions),
        "checks": [(one.checks, one.disagreed) for one in ours["status"].sentinels],
    }


def chosen():
    """Auto chooses; on a CPU by planted times, as a replay is as slow as eager there."""
    with paced(FASTER) if DEVICE.type == "cpu" else contextlib.nullcontext():
        return beside_eager("auto", steps=120, total=TOTAL)


def evaluations():
    """Whole parameters are left by a forward without gradients, and the root's are not freed after it."""

    def between(number, model, _optimizer):
        if number % 7 == 5:
            model.eval()
            with torch.no_grad():
                model(torch.ones(3, 6, device=DEVICE))
            model.train()

    return beside_eager(between=between)


def evaluated_after():
    """What an evaluation gathers after a replay are the new parameters."""
    told = []

    def between(number, model, _optimizer):
        if number % 7 == 5:
            with torch.no_grad():
                told.append(model.eval()(torch.ones(3, 6, device=DEVICE)))
            model.train()

    found = beside_eager(between=between)
    half = len(told) // 2
    found["same"] &= all(
        torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in zip(told[:half], told[half:], strict=True)
    )
    return found


def accumulated_over_calls(**how):
    """Gradients are used in every second call."""
    global ALWAYS
    ALWAYS = False
    try:
        return beside_eager(**how)
    finally:
        ALWAYS = True


def unsynced_kinds():
    """The calls that keep whole gradients are of another kind than those that find them."""
    return accumulated_over_calls(between=lambda number, model, _: model.set_requires_gradient_sync(number % 2 == 1))


def unsynced_within():
    """Every second call leaves whole gradients, and all settings as they were."""
    return accumulated_over_calls(syncs=lambda update: update)


def averaged():
    """The step averages its shards, and the loop is given the average."""
    average, earlier = [], []

    def made():
        model = sharded()
        earlier[:] = average
        average[:] = [one.detach().clone() for one in model.parameters()]
        return model

    def inside(model, _last):
        for ours, now in zip(average, model.parameters(), strict=True):
            ours.lerp_(now.detach(), 0.1)

    told = beside_eager(made=made, inside=inside, state=[average])
    told["same"] &= all(torch.equal(shard_of(a), shard_of(b)) for a, b in zip(average, earlier, strict=True))
    return told


def evaluates_inside():
    """The step ends with a forward that no backward follows."""
    held = []

    def made():
        held[:] = [sharded()]
        return held[0]

    def clear(optimizer):
        optimizer.zero_grad()
        with torch.no_grad():
            held[0](torch.ones(3, 6, device=DEVICE))

    return beside_eager(made=made, clear=clear)


def hooked_later():
    """A hook that changes gradients is set while the step is replayed."""

    def between(number, model, _optimizer):
        if number == 35:
            for module in (model, model.first, model.second):
                module.set_all_reduce_hook(lambda gradient: gradient.mul_(0.5))

    return beside_eager(between=between)


def taught():
    """The step calls a sharded model that the loop was not given."""
    teacher = sharded()

    def inside(_model, _last):
        with torch.no_grad():
            teacher(torch.ones(3, 6, device=DEVICE))

    def between(number, *_):
        if number % 6 == 5:
            for module in (teacher, teacher.first, teacher.second):
                module.reshard()

    return beside_eager(inside=inside, between=between)


def synced_last(model, last):
    model.set_requires_gradient_sync(last)


def unsynced_calls():
    """Whole gradients are kept from one call to the next."""
    return beside_eager(
        between=lambda number, model, _: model.set_requires_gradient_sync(number < 30 or number % 2 == 1)
    )


def divided():
    """What gradients are divided by changes while the step is replayed."""

    def between(number, model, _optimizer):
        if number == 35:
            for module in (model, model.first, model.second):
                module.set_gradient_divide_factor(8.0)

    def made():
        model = sharded()
        for module in (model, model.first, model.second):
            module.set_force_sum_reduction_for_comms(True)
        return model

    return beside_eager(made=made, between=between, clips=False)


def reloaded():
    """A state is saved while the step is replayed, and loaded again later: model and optimizer, through torch's own."""
    kept = {}

    def between(number, model, optimizer):
        if number == 30:
            kept.clear()
            states = get_state_dict(model, optimizer)
            kept.update({"states": _cloned(states)})
        if number == 40:
            set_state_dict(model, optimizer, model_state_dict=kept["states"][0], optim_state_dict=kept["states"][1])

    return beside_eager(between=between, steps=80)


def _cloned(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _cloned(one) for name, one in value.items()}
    return type(value)(map(_cloned, value)) if isinstance(value, list | tuple) else value


def flaky():
    """An exception in one process after its collectives, in each step of the way, one training each."""
    told = {}
    for at in range(10, 16):

        def between(number, _model, _optimizer, at=at):
            sys.setswitchinterval(2 * _USUAL if (number, RANK) == (at, SIZE - 1) else _USUAL)

        one = beside_eager(between=between, steps=30)
        told[at] = one["same"], one["tier"]
    return {"same": all(same for same, _ in told.values()), "tiers": sorted({tier for _, tier in told.values()})}


@contextlib.contextmanager
def planted(owner, name, make):
    """Put a function in another's place while the block runs."""
    real = getattr(owner, name)
    setattr(owner, name, make(real))
    try:
        yield
    finally:
        setattr(owner, name, real)


def failing(owner, name, when, error=RuntimeError):
    """Return a context in which a function of one process's raises once `when` holds of its count of calls."""
    calls = []

    def make(real):
        def function(*args, **kwargs):
            calls.append(1)
            if RANK == SIZE - 1 and when(len(calls)):
                raise error("planted")
            return real(*args, **kwargs)

        return function

    return planted(owner, name, make)


def fails_to_capture():
    with failing(TapeRecording, "cut", lambda _: True):
        return beside_eager()


def fails_in_a_backward():
    """The first reduction of a backward is followed by what no capture allows, in all processes."""
    done = []

    def make(real):
        def record(self, operation, args, kwargs):
            result = real(self, operation, args, kwargs)
            if "reduce_scatter" in str(operation) and not done:
                done.append(1)
                raise RuntimeError("planted: no capture")
            return result

        return record

    with planted(Tape, "record", make):
        return beside_eager()


def no_memory():
    with failing(trial_run, "Snapshot", lambda _: torch.is_grad_enabled(), torch.OutOfMemoryError):
        return beside_eager()


def fails_in_a_replay():
    with failing(Inputs, "fill", lambda times: times == 20):
        return beside_eager()


def host_read():
    def inside(model, _last):
        if RANK == SIZE - 1:
            shard_of(next(model.parameters())).sum().item()

    return beside_eager(inside=inside)


def wrong():
    """A recording of one process goes wrong after it was proven: a check finds it, and eager's outcome stays."""
    replayed = []

    def make(real):
        def replay(self):
            real(self)
            replayed.append(1)
            if RANK == SIZE - 1 and len(replayed) > 30:
                for operation, args, _, _ in self._operations:
                    if "_fused_adamw_" in str(operation):
                        args[0][0].mul_(1.001)

        return replay

    with planted(Tape, "replay", make), CAPTURES():
        ours = train("eager+graph", steps=400, sentinel=0.5)
    return {
        "last": ours["ran"][-1][0],
        "log": "".join(what[0] for _, what in ours["ran"]),
        "status": str(ours["status"]),
        "checks": [(one.checks, one.disagreed) for one in ours["status"].sentinels],
    }


def of_two_dimensions():
    mesh = init_device_mesh(DEVICE.type, (1, SIZE), mesh_dim_names=("copies", "shards"))
    return beside_eager(made=lambda: sharded(mesh=mesh))


def tensor_parallel():
    mesh = init_device_mesh(DEVICE.type, (SIZE,))

    def made():
        torch.manual_seed(0)
        return parallelize_module(Net().to(DEVICE), mesh, {"first": ColwiseParallel(output_layouts=Replicate())})

    return beside_eager(made=made, by=lambda ones: torch.optim.SGD(ones, lr=0.1, foreach=False), clips=False)


WAYS = {
    "plain": beside_eager,
    "recomputed": lambda: beside_eager(made=lambda: sharded(net=Recomputed)),
    "unfused": lambda: beside_eager(by=lambda ones: torch.optim.AdamW(ones, lr=0.01), exactly=False),
    "kept whole": lambda: beside_eager(made=lambda: sharded(reshard_after_forward=False)),
    "never whole": lambda: beside_eager(made=lambda: sharded(reshard_after_forward=True)),
    "part whole": lambda: beside_eager(made=lambda: sharded(reshard_after_forward=SIZE // 2)),
    "half": lambda: beside_eager(
        made=lambda: sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    ),
    "zeroed": lambda: beside_eager(clear=lambda one: one.zero_grad(set_to_none=False)),
    "twice": lambda: beside_eager(times=2),
    "synced last": lambda: beside_eager(times=2, inside=synced_last),
    "over calls": accumulated_over_calls,
    "unsynced calls": unsynced_calls,
    "unsynced kinds": unsynced_kinds,
    "unsynced within": unsynced_within,
    "hooked later": hooked_later,
    "taught": taught,
    "averaged": averaged,
    "evaluates inside": evaluates_inside,
    "evaluations": evaluations,
    "evaluated after": evaluated_after,
    "begun": lambda: beside_eager(between=lambda _number, model, _: model.unshard(async_op=True)),
    "divided": divided,
    "reloaded": reloaded,
    "flaky": flaky,
    "short batches": lambda: beside_eager(sizes=lambda number: 4 if RANK == SIZE - 1 and number % 9 == 7 else 6),
    "host read": host_read,
    "fails to capture": fails_to_capture,
    "fails in a backward": fails_in_a_backward,
    "fails in a replay": fails_in_a_replay,
    "no memory": no_memory,
    "wrong": wrong,
    "auto": chosen,
    "sgd": lambda: beside_eager(by=lambda ones: torch.optim.SGD(ones, lr=2**-6)),
    "offloaded": lambda: beside_eager(made=lambda: sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "two dimensions": of_two_dimensions,
    "tensor parallel": tensor_parallel,
}


if __name__ == "__main__":
    main(WAYS)

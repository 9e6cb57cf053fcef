"""Learn where to look: ``hotloop train recipe=focus``. A language model reads long texts through a budget of slots.

A text is there in blocks of 32 tokens, each as its tokens or as one embedding, its gist. Three networks are trained,
all from nothing: the model predicts what follows, the gist encoder sums a block up, and the lens scores each slot of
what is shown: whether to expand a gist into its tokens, or to collapse a block into its gist. Between two steps the
allocator asks the lens about each text again and again, and does the best few edits that the budget has room for. The
next step reads each text through the context that it chose and through others, and the lens learns to prefer what
predicted better. Texts are Python's documentation and source of its standard library, several documents by turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop.recipes.focus import texts
from hotloop.recipes.focus.context import BLOCK, Frame
from hotloop.recipes.focus.program import Controller, Data
from hotloop.recipes.focus.telling import paces, ways
from hotloop.step import Workload
from hotloop.train import configure, environment
from hotloop.train.export import Made
from hotloop.train.folds import Side, Sides
from hotloop.train.goal import Goal
from hotloop.train.recipe import on_devices
from hotloop.train.task import Task, judge

if TYPE_CHECKING:
    from hotloop.train.display import Display
    from hotloop.train.ranks import Devices
    from hotloop.train.settings import Settings
    from hotloop.train.start import Start

COMPONENTS = ("model", "gist", "lens")
"""What can be compiled, each with presets of its own for training and for inference."""
GOAL = Goal("loss", maximize=False)
"""What says which validation is the best: the loss of what follows held-out texts, with the lens."""
OVERLAP = 4
"""Each token stands in so many pieces of its document."""
TINY = (
    "focus.documents=1", "focus.blocks=6", "focus.budget=104", "focus.vocabulary=257", "focus.hidden_size=32",
    "focus.layers=1", "focus.heads=2", "focus.lens_size=16", "focus.lens_layers=1", "focus.contexts=3",
    "training.batch_size=4", "training.eval_batch_size=4",
)  # fmt: skip
"""The settings of `make`."""


@on_devices(*COMPONENTS)
def train(start: Start, display: Display, devices: Devices) -> Task:
    """Make the recipe's task. `on_devices` trains it, from the start or from where the run stopped.

    Raises:
        ConfigError: settings that cannot be used.
        DataError: too little text to learn or to judge by.
    """
    settings = start.settings

    # A budget that cannot be used is refused here, before anything is loaded or written.
    frame, device = Frame.of(settings.focus), devices.fabric.device

    # The data: documents, none of them on both sides, and tokens learnt from the training side alone.
    sides = texts.load(settings)
    start.check_data(sides.fingerprint())
    tokens, data = windows(settings, sides)
    about = (
        f"{sides.describe()}; a vocabulary of {tokens.count:,} tokens; texts of {data.train.shape[1]:,} tokens "
        f"from {settings.focus.documents} documents each: {len(data.train):,} to learn from, {len(data.validation)} to "
        "judge by"
    )
    context = (
        f"{frame.budget} slots for {frame.blocks} blocks of {BLOCK} tokens, {frame.protected} of them protected; room "
        f"to expand {frame.room} of the others"
    )
    display.say(f"Data: {about}\nWorking context: {context}")

    # The networks, with random weights, and the program around them.
    environment.seed(settings.run.seed)
    controller = Controller(settings, tokens.count, data, device)
    task = Task(
        name="focus",
        workload=workload_of(controller),
        device=device,
        goal=GOAL,
        make=lambda: workload_of(Controller(settings, tokens.count, data, device)),
        fingerprint=sides.fingerprint(),
        per_step={"samples": settings.training.batch_size},
        context={"validation_texts": len(data.validation), "budget": frame.budget},
        remarks=lambda _, __, components: [*ways(controller.last), *paces(components)],
        told={"data": [about], "working context": [context]},
    )
    display.say(task.checked(settings.training))
    return task


def sides(settings: Settings) -> Sides:
    """Say what `train` learns from and is judged by: the documents on both sides, and how much of each."""
    found = texts.load(settings)
    first, second = (Side((None,) * len(side), tuple(one.name for one in side)) for side in found)
    return Sides(first, second, found.fingerprint())


def evaluate(settings: Settings, weights: dict[str, Any]) -> dict[str, float]:
    """Judge a checkpoint's weights on the documents that were held out.

    Raises:
        ConfigError: the weights do not fit the networks that the settings describe.
    """
    device = environment.device_of(settings.run)
    tokens, data = windows(settings, texts.load(settings))
    workload = workload_of(Controller(settings, tokens.count, data, device))
    Task(name="focus", workload=workload, device=device).load_judged(weights)
    return judge(workload)


def made(settings: Settings, weights: dict[str, Any]) -> Made:
    """Make the networks again with a checkpoint's weights, for `hotloop export`."""
    tokens, data = windows(settings, texts.load(settings))
    workload = workload_of(Controller(settings, tokens.count, data, torch.device("cpu")))
    Task(name="focus", workload=workload, device=torch.device("cpu")).load_judged(weights)
    return Made(workload.models())


def windows(settings: Settings, sides: texts.Sides) -> tuple[texts.Tokens, Data]:
    """Make texts of both sides, each with the block behind it; of the held-out ones a sample.

    Raises:
        DataError: too few documents of a side are long enough.
    """
    chosen, generator = settings.focus, torch.Generator().manual_seed(settings.run.seed)
    tokens = texts.Tokens("\n\n".join(one.text for one in sides.train), chosen.vocabulary)
    ahead = (chosen.protected + 1) * BLOCK
    length = (chosen.blocks - chosen.protected) // chosen.documents * BLOCK + ahead
    both = [
        texts.by_turns(texts.cut(side, tokens.encode, length, length // OVERLAP), chosen.documents, ahead, generator)
        for side in sides
    ]
    order = torch.randperm(len(both[1]), generator=generator)
    return tokens, Data(both[0], both[1][order[: chosen.held_out]])


def workload_of(controller: Controller) -> Workload:
    """Return a controller as the program that everything of hotloop's takes.

    The networks have names, which are those of the components. The allocator chooses what a step sees in ``before``: it
    is what is called without gradients, in presets of its own, and contexts are drawn there as well, on the host.
    """
    return Workload(
        {"model": controller.model, "gist": controller.gist, "lens": controller.lens},
        controller.optimizer,
        controller.step,
        controller.loader,
        metrics=controller.metrics,
        state=controller.rate,
        infer=controller.infer,
        before=controller.before,
    )


def make() -> Workload:
    """Return a tiny controller as a program: ``hotloop.recipes.focus:make`` for harness, bench, verify and doctor.

    Its texts are random tokens in which far blocks return, so that no data is needed.
    """
    settings = configure.load(["recipe=focus", *TINY])
    length, generator = (settings.focus.blocks + 1) * BLOCK, torch.Generator().manual_seed(0)
    found = torch.randint(settings.focus.vocabulary, (24, length), generator=generator)
    found[:, -BLOCK:] = found[:, BLOCK : 2 * BLOCK]
    data = Data(found[:16], found[16:])
    device = environment.device_of(settings.run)
    return workload_of(Controller(settings, settings.focus.vocabulary, data, device))

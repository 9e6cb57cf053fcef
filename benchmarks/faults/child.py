"""One run in one way, with a fault planted in its process.

usage: python -m benchmarks.faults.child WAY [SETTING=VALUE ...] --trait TRAIT --preset PRESET [--plant NAME]

Writes losses, the trained model's loss, and the status to ``$FAULTS_FOLDER/result.json``; ``hotloop train`` has them
in its record.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import pathlib
import sys
import warnings

from benchmarks.faults import planting
from benchmarks.faults.program import CHECKPOINT_EVERY, PLACE, STEPS, Batches, PlantedError, Program

RECORD = PLACE / "run"


def by_hand(program, step, losses):
    """Go through all batches from where the optimizer is, with a checkpoint now and then.

    A step that is interrupted, or whose hook raised, is done again unless it is done.
    """
    batches = itertools.chain.from_iterable(itertools.repeat(program.batches, program.rounds))
    for batch in itertools.islice(batches, program.done(), None):
        number = program.done()
        if number % CHECKPOINT_EVERY == 0:
            program.save(losses)
        while program.done() == number:
            program.before(number)
            try:
                losses[number] = float(step(*batch))
            except (KeyboardInterrupt, PlantedError) as error:
                print(f"step {number} ended by {type(error).__name__}: {error}; it is done again", flush=True)
                program.optimizer.zero_grad()


def in_place(program, preset, losses):
    import hotloop

    for module in program.compiled.values() if preset else ():
        hotloop.compile(module, preset=preset)
    by_hand(program, program.step, losses)
    return [hotloop.status(module) for module in program.compiled.values()] if preset else []


def loop(program, preset, losses):
    import hotloop

    if not preset:
        by_hand(program, program.step, losses)
        return []
    models = [*program.compiled.values()]
    with hotloop.Loop(models if len(models) > 1 else models[0], program.optimizer, run=preset, record=RECORD) as owned:
        by_hand(program, owned.step(program.step), losses)
        return [owned.status(), *(hotloop.status(module) for module in models)]


def lightning(program, preset, losses):
    import lightning.pytorch as pl
    from torch.nn import functional as F

    from hotloop.integrations.lightning import HotLoop

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = program.model

        def training_step(self, batch, _):
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return program.optimizer

    class Notes(pl.Callback):
        def on_train_batch_start(self, *_):
            program.before(program.done())

        def on_train_batch_end(self, trainer, module, outputs, *_):
            losses[program.done() - 1] = float(outputs["loss"])

    module, said = Module(), []
    while program.done() < STEPS:
        callbacks = [Notes(), *([HotLoop(run=preset, record=RECORD)] if preset else [])]
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=program.rounds, callbacks=callbacks, enable_model_summary=False, **quiet
        )
        left = Batches(program.batches[program.done() :]) if program.rounds == 1 else program.batches
        try:
            trainer.fit(module, left)
        except (KeyboardInterrupt, PlantedError, SystemExit) as error:
            print(f"step {program.done()} ended by {type(error).__name__}: {error}; the fit goes on", flush=True)
            program.optimizer.zero_grad()
        said += [callbacks[1].status()] if preset else []
    program.model.train()
    return said


def train(arguments):
    from hotloop.cli import main as command

    command(["train", f"{pathlib.Path(__file__).with_name('program.py')}:make", *arguments])


def running(status):
    """Return what a status says that the model, loop or fit ran in."""
    if hasattr(status, "components"):
        return next(iter(status.components.values())).running
    return getattr(status, "tier", None) or status.running


WAYS = {"compile": in_place, "loop": loop, "lightning": lightning}


def main():
    """Run one way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("way", choices=[*WAYS, "train"])
    parser.add_argument("--trait", default="plain")
    parser.add_argument("--preset", default="")
    parser.add_argument("--plant", default="")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, but for hotloop train")
    parser.add_argument("--shared", action="store_true", help="compile within shared_compiles, as hotloop train does")
    parser.add_argument("arguments", nargs="*")
    given, options = parser.parse_known_args()  # options of hotloop train, such as --config=FILE
    warnings.simplefilter("ignore")
    if given.preset not in ("", "aot_eager"):
        planting.as_eager_draws()
    if given.plant:
        getattr(planting, given.plant)(given.way)
    if given.way == "train":  # whose preset is among its settings
        train([*given.arguments, *options])
        return
    program, losses = Program(given.trait), {}
    if given.resume:
        program.load(losses)
    with contextlib.ExitStack() as stack:
        if given.shared and given.preset:
            from hotloop.cache import shared_compiles

            stack.enter_context(shared_compiles(program.model))
        status = WAYS[given.way](program, given.preset, losses)
    result = {
        "losses": [losses.get(number) for number in range(program.done())],
        "final": float(program.final()),
        "status": "\n".join(map(str, status)),
        "ran": [running(one) for one in status],
    }
    (PLACE / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

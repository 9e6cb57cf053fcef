"""transformers: a callback for its Trainer, and a Trainer that hands its training step to a `hotloop.Loop`.

::

    from hotloop.integrations.transformers import HotLoop, HotTrainer

    Trainer(model, args, ..., callbacks=[HotLoop("default")])  # compiled in place; the Trainer keeps its step
    HotTrainer(model, args, ...)  # the step is a loop's: chosen by measuring, captured on a GPU, undone where it fails

A callback is told of a step and cannot run it. So with the callback alone a failure of compiled code at run time is
raised (`CompiledRunError`), nothing is captured, and nothing is timed against eager. `HotStep` makes any other subclass
of Trainer a `HotTrainer`: ``class MyTrainer(HotStep, SFTTrainer)``.
"""

from __future__ import annotations

from hotloop.errors import missing_extra

try:
    import accelerate as _accelerate  # type: ignore[import-untyped]  # noqa: F401 - a missing extra is reported here
    import transformers as _transformers  # noqa: F401 - the same
except ImportError as error:
    raise missing_extra("hotloop.integrations.transformers", "hf", error) from error

from hotloop.integrations.transformers.callback import HotLoop
from hotloop.integrations.transformers.trainer import HotStep, HotTrainer

__all__ = ["HotLoop", "HotStep", "HotTrainer"]

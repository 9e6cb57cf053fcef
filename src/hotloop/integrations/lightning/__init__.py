"""Lightning's Trainer: one callback that owns the training step where the hooks allow it, and compiles in place.

::

    trainer = Trainer(callbacks=[HotLoop(run="auto")])
"""

from __future__ import annotations

from hotloop.errors import missing_extra

try:
    import lightning.pytorch as _  # noqa: F401 - a missing extra is reported here, in our words
except ImportError as error:
    raise missing_extra("hotloop.integrations.lightning", "lightning", error) from error

from hotloop.integrations.lightning.callback import HotLoop
from hotloop.integrations.lightning.status import TrainerStatus

__all__ = ["HotLoop", "TrainerStatus"]

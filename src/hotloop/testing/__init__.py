"""What test suites need, ours and users': captured steps and CUDA graphs without a GPU, and assertions."""

from hotloop.testing.assertions import (
    assert_compiled,
    assert_max_recompiles,
    assert_outputs_owned,
    assert_steps_marked,
)
from hotloop.testing.captured import captured_step_emulation
from hotloop.testing.cudagraphs import cudagraph_emulation

__all__ = [
    "assert_compiled",
    "assert_max_recompiles",
    "assert_outputs_owned",
    "assert_steps_marked",
    "captured_step_emulation",
    "cudagraph_emulation",
]

"""Helpers for test suites, ours and users': captured steps and CUDA graphs without a GPU, assertions."""

from hotloop.compiling.fallback.emulation import cudagraph_emulation
from hotloop.step.audit.host_side import on_host
from hotloop.testing.assertions import (
    assert_compiled,
    assert_max_recompiles,
    assert_outputs_owned,
    assert_steps_marked,
)
from hotloop.testing.captured import captured_step_emulation
from hotloop.testing.planted import planted_failure

__all__ = [
    "assert_compiled",
    "assert_max_recompiles",
    "assert_outputs_owned",
    "assert_steps_marked",
    "captured_step_emulation",
    "cudagraph_emulation",
    "on_host",
    "planted_failure",
]

"""What test suites need, ours and users': a captured step without a GPU."""

from hotloop.testing.captured import captured_step_emulation

__all__ = ["captured_step_emulation"]

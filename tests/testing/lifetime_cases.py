"""The table of programs under CUDA graphs: each is flagged by the emulation, or is right.

It runs under the emulation (tests/testing) and on real CUDA graphs (tests/gpu).
"""

from __future__ import annotations

import dataclasses
import typing

import lifetime_programs as programs


@dataclasses.dataclass(frozen=True)
class Case:
    """One program: whether plain ``torch.compile`` with CUDA graphs gets it wrong, and why.

    ``hotloop`` is what `hotloop.compile` makes of it: ``right`` or ``raises``. With ``dies`` torch fails by an internal
    error that leaves the process unsound, so that on a GPU plain ``torch.compile`` runs it in a process of its own.
    """

    program: typing.Callable
    flagged: bool
    why: str
    hotloop: str = "right"
    dies: bool = False

    @property
    def name(self):
        return self.program.__name__


_OVER = "the later call overwrites it"
_COPY = "a copy has memory of its own"
_STOLEN = "the gradient is the graph's own memory, which the next step overwrites"
CASES = (
    Case(programs.held_output, True, _OVER),
    Case(programs.two_inference_calls, True, _OVER),
    Case(programs.held_view, True, "a view shares the memory"),
    Case(programs.detached_output, True, "detach() shares the memory"),
    Case(programs.list_of_losses, True, _OVER),
    Case(programs.numbers_of_losses, False, "item() reads it before the next call"),
    Case(programs.cloned_output, False, _COPY),
    Case(programs.owned_output, False, _COPY),
    Case(programs.owned_training_output, False, _COPY),
    Case(programs.owned_gradients, False, _COPY),
    Case(programs.accumulation, True, _STOLEN),
    Case(programs.accumulation_into_zeros, False, "the graph's gradient is added to memory of the user's"),
    Case(programs.old_gradients, True, _STOLEN),
    Case(programs.old_gradients_cloned, False, _COPY),
    Case(programs.gradients_by_grad, True, _STOLEN),
    Case(programs.gradient_of_an_input, True, _STOLEN),
    Case(programs.mark_between_two_forwards, True, "the mark gives up what the first forward saved", hotloop="raises"),
    Case(programs.two_forwards_one_backward, False, "no generation begins while a backward is pending"),
    Case(programs.two_forwards_two_backwards, False, "a backward begins no generation"),
    Case(programs.forward_between_two_backwards, True, "after one backward torch takes nothing to be pending"),
    Case(programs.average_that_begins_as_an_output, True, _OVER),
    Case(programs.average_that_begins_as_zeros, False, "each output is read before the next call"),
    Case(programs.output_passed_to_a_later_call, True, "the call that takes it begins a new generation"),
    Case(programs.output_owned_and_passed_on, False, _COPY),
    Case(programs.chain_in_training, False, "no generation begins while a backward is pending"),
    Case(programs.modules_share_a_pool, True, "all compiled code of a thread shares one pool"),
    Case(programs.greedy_by_numbers, False, "item() reads it before the next call"),
    Case(programs.greedy_that_keeps_the_best, True, _OVER),
    Case(programs.hidden_state_across_calls, True, "the call that takes it begins a new generation"),
    Case(programs.hidden_state_cloned, False, _COPY),
    Case(programs.hidden_state_in_training, False, "no generation begins while a backward is pending"),
    Case(programs.backward_twice, True, "a backward that keeps its graph cannot be replayed: torch raises", dies=True),
    Case(programs.exception_before_backward, False, "a forward without backward holds its generation open"),
    Case(programs.evaluation_before_backward, False, "no generation begins while a backward is pending"),
    Case(programs.plain_training, False, "gradients are dropped before the next forward"),
    Case(programs.gradients_dropped_late, False, "the overwritten gradients are dropped, not read"),
    Case(programs.what_was_given, False, "inputs and parameters are no outputs of the graph"),
    Case(programs.capture_is_skipped, False, "a graph that writes into an input is not captured"),
    Case(programs.memory_is_used_again, False, "an address that is given out again is another tensor"),
)

"""How torch's own trees of CUDA graphs are read, with stand-ins for what only a GPU makes."""

import inspect
import types

import pytest
import torch

from hotloop import presets
from hotloop._torch import cudagraphs
from hotloop.compiling.fallback import LadderBackend


@pytest.fixture
def trees():
    import torch._inductor.cudagraph_trees as found

    return found


class Node:
    """A graph that ran: it left one tensor."""

    def __init__(self, tensor, function):
        self.outputs_weakrefs = [lambda: cudagraphs.storage_key(tensor), None, lambda: None]
        self.tensor_weakrefs = [lambda: tensor, None, lambda: None]
        self.stack_traces = ['  File "/home/user/train.py", line 7, in forward\n    return x', None, None]
        self.wrapped_function = types.SimpleNamespace(id=function)
        self._path_from_root = [self]
        self._tensor = tensor

    def _is_cuda_graph_recorded_tensor(self, tensor):
        return tensor.untyped_storage().data_ptr() == self._tensor.untyped_storage().data_ptr()


@pytest.fixture
def manager(trees, monkeypatch):
    made = types.SimpleNamespace(
        current_node=None,
        running_forwards_with_pending_backwards=False,
        id_to_mode={1: trees.CompilationMode.BACKWARD},
    )
    containers = {0: types.SimpleNamespace(tree_manager=made), 1: types.SimpleNamespace(tree_manager=None)}
    monkeypatch.setattr(trees.local, "tree_manager_containers", containers, raising=False)
    return made


def test_a_reset_of_torch_frees_the_graphs_of_components_too(trees, monkeypatch):
    asked = []
    monkeypatch.setattr(trees, "reset_cudagraph_trees", lambda: asked.append(True))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cudagraphs, "private", lambda path: getattr(trees, path.partition(":")[2]))
    LadderBackend((presets.get("reduce-overhead"), presets.get("none"))).reset()
    assert asked == [True]
    LadderBackend((presets.get("aot_eager"), presets.get("none"))).reset()
    assert asked == [True]


def test_the_rule_of_generations_is_the_one_that_was_copied(trees):
    """Where torch changes it, the emulation has to follow."""
    manager = trees.CUDAGraphTreeManager
    rule = inspect.getsource(manager.can_start_new_generation)
    assert "in_new_torch_compile_invocation" in rule
    assert "user_invoked_mark_step" in rule
    assert "running_forwards_with_pending_backwards" in rule
    assert "mark_step_counter != 0" in inspect.getsource(manager.get_curr_generation)
    assert "BACKWARD" in inspect.getsource(manager.run)
    asked = types.SimpleNamespace(current_gen=1, running_forwards_with_pending_backwards=True)
    asked.get_curr_generation = lambda: 2
    # From torch 2.14 on the rule hands the generation on, which it may have been given: None where it was not.
    asked.in_new_torch_compile_invocation = lambda *now: manager.in_new_torch_compile_invocation(asked, *now)
    asked.user_invoked_mark_step = lambda: False
    assert not manager.can_start_new_generation(asked)
    asked.user_invoked_mark_step = lambda: True
    assert manager.can_start_new_generation(asked)
    asked.user_invoked_mark_step, asked.running_forwards_with_pending_backwards = (lambda: False), False
    assert manager.can_start_new_generation(asked)
    asked.current_gen = 2
    assert not manager.can_start_new_generation(asked)

"""The ledger of private torch names matches the code, both ways, and nothing outside `_torch` uses any."""

import ast
import gc
import importlib
import re
import sys
import weakref
from pathlib import Path

import pytest
import torch

import hotloop
from hotloop._torch import ledger, versions

SOURCE = Path(hotloop.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
PRIVATE_ROOM = SOURCE / "_torch"
# Attributes with an underscore that are no torch names: Python's own, and those of public Python types.
NOT_TORCH = re.compile(r"^__\w+__$|^_(fields|replace|asdict|make|current_frames|private_to|hotloop\w*)$")
# A path of torch in a string: "torch._dynamo.x", "torch:_Name", or "torch.multiprocessing.reductions:Name".
SINCE = {
    "torch._C:_override_stale_capture_stream": (2, 13),
    "torch:_foreach_clone": (2, 13),
    "FSDPState._fsdp_param_groups": (2, 13),
}
HERE = versions.parse(torch.__version__)
DOTTED = re.compile(r"^torch((\.\w+)*[.:]_\w+([.:]\w+)*|(\.\w+)+:\w+)$")
LISTED = {name.path.replace(":", ".") for name in ledger.LEDGER}


def own_names(tree):
    """Underscore names that the file defines itself: attributes of its classes, functions, module constants."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def private_uses(file):
    """Return the private torch names that a file uses: those asked of the ledger, imported, and foreign attributes."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    asked, imported, attributes = set(), set(), set()
    own = own_names(tree)
    docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            if DOTTED.match(node.value):
                asked.add(node.value)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names if alias.name.startswith("torch")}
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not NOT_TORCH.match(node.attr):
            mine = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not mine and node.attr not in own:
                attributes.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and str(name.value).startswith("_") and not NOT_TORCH.match(name.value):
                attributes.add(name.value)
    return asked, {name for name in imported if "._" in name or name in LISTED}, attributes


def rooms():
    inside = [private_uses(file) for file in FILES if PRIVATE_ROOM in file.parents and file.name != "ledger.py"]
    return [set().union(*parts) for parts in zip(*inside, strict=True)]


@pytest.mark.campaign
def test_every_path_in_the_code_is_in_the_ledger_and_every_path_in_the_ledger_is_in_the_code():
    asked, _, _ = rooms()
    outside = [private_uses(file)[0] for file in FILES if PRIVATE_ROOM not in file.parents]
    asked = asked.union(*outside)  # a capability is asked for by its path
    assert asked == {name.path for name in ledger.LEDGER if name.path.startswith("torch")}


def test_attributes_of_torchs_objects_are_in_the_ledger_both_ways():
    _, _, attributes = rooms()
    listed = {name.path.rpartition(".")[2] for name in ledger.LEDGER if name.path[0].isupper()}
    slots = {name for name in listed if f'"{name}"' in (PRIVATE_ROOM / "module.py").read_text()}
    assert attributes | slots == listed


def test_private_torch_is_never_imported_by_statement():
    assert rooms()[1] == set()


@pytest.mark.parametrize("file", [f for f in FILES if PRIVATE_ROOM not in f.parents], ids=lambda f: f.stem)
def test_no_other_room_uses_private_torch(file):
    _, imported, attributes = private_uses(file)
    assert not imported
    torchs = {name.path.rpartition(".")[2] for name in ledger.LEDGER if name.path[0].isupper()}
    assert not attributes & torchs
    chains = [
        ast.unparse(n) for n in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(n, ast.Attribute)
    ]
    assert not [chain for chain in chains if re.match(r"torch\.(\w+\.)*_(?!_)\w+$", chain)]


@pytest.mark.parametrize("name", [entry for entry in ledger.LEDGER if ":" in entry.path], ids=lambda entry: entry.path)
def test_each_path_is_there_and_says_why(name):
    if SINCE.get(name.path, (0, 0)) > HERE:
        pytest.skip("newer torch has it")
    assert ledger.private(name.path) is not None
    assert name.why


def examples():
    """Objects that have the attributes of the ledger, by the class that it names."""
    layer = torch.nn.Linear(2, 2)
    traced = []
    wrapped = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    wrapped._join_config = wrapped._comm_hooks = wrapped._has_rebuilt_buckets = None  # set as one is made

    def backend(graph, inputs):
        traced.extend([graph, next(node for node in graph.graph.nodes if node.op == "placeholder")])
        return graph.forward

    torch.compile(layer, backend=backend)(torch.ones(1, 2))
    with pytest.warns(DeprecationWarning, match="torch.jit.trace"):
        scripted = torch.jit.trace(torch.neg, torch.ones(1))
    optimizer = torch.optim.SGD(layer.parameters())
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return {
        **sharded_examples(),
        "Module": layer,
        "Function": torch.compile(lambda x: x, backend="eager"),
        "Tensor": layer.weight,
        "Optimizer": optimizer,
        "Step": optimizer.step,
        "GradScaler": torch.amp.GradScaler,
        "GraphModule": traced[0],
        "Node": traced[1],
        "OpOverload": torch.ops.aten.add.Tensor,
        "Generator": torch.Generator(),
        "ScriptFunction": scripted,
        "Distribution": torch.distributions.Normal(0.0, 1.0),
        "UntypedStorage": layer.weight.untyped_storage(),
        "BackwardCFunction": torch.autograd.Function._backward_cls,
        "CUDAGraphNode": importlib.import_module("torch._inductor.cudagraph_trees").CUDAGraphNode,
        "DistributedDataParallel": wrapped,
        "Reducer": torch.distributed.Reducer,
        "ProcessGroup": torch.distributed.ProcessGroup,
        "Options": torch.distributed.distributed_c10d.ProcessGroupGloo._Options,
    }


def sharded_examples():
    """Objects that FSDP2 makes, after a forward."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        layer = importlib.import_module("torch.distributed.fsdp").fully_shard(torch.nn.Linear(2, 2))
        layer(torch.ones(1, 2))
        state = layer._get_fsdp_state()
        group = state._fsdp_param_group
        parameter = group.fsdp_params[0]
        return {
            "FSDPModule": layer,
            "FSDPState": state,
            "FSDPParamGroup": group,
            "FSDPParam": parameter,
            "DTensor": parameter.sharded_param,
        }
    finally:
        torch.distributed.destroy_process_group()


def test_each_attribute_is_there():
    objects = examples()
    # `_boxed_call` is written, not read: torch asks any callable for it.
    listed = [name.path.split(".") for name in ledger.LEDGER if ":" not in name.path and name.path[0].isupper()]
    here = [(kind, name) for kind, name in listed if SINCE.get(f"{kind}.{name}", (0, 0)) <= HERE]
    missing = [f"{kind}.{name}" for kind, name in here if kind != "Callable" and not hasattr(objects[kind], name)]
    assert missing == []


@pytest.mark.skipif(HERE < (2, 15), reason="torch.foreach is public since torch 2.15")
@pytest.mark.parametrize(("path", "public"), ledger._PUBLIC.items())
def test_what_newer_torch_made_public_is_used_publicly(path, public):
    module, _, name = public.partition(":")
    assert ledger.private(path) is getattr(sys.modules[module], name)


def test_a_name_that_is_not_in_the_ledger_is_refused():
    with pytest.raises(KeyError, match="not in the ledger"):
        ledger.private("torch._dynamo:reset")


def test_a_missing_name_is_a_capability_with_a_reason(monkeypatch):
    gone = ledger.PrivateName("torch._dynamo:nonesuch", "a test")
    monkeypatch.setattr(ledger, "LEDGER", (*ledger.LEDGER, gone))
    monkeypatch.setattr(ledger, "_PATHS", ledger._PATHS | {gone.path})
    found = ledger.capability("something", gone.path)
    assert not found.available
    assert "hotloop uses it: a test" in found.reason


def test_a_missing_name_keeps_no_tensor_of_whoever_asks(monkeypatch):
    """An exception that its own frame holds is a cycle, with the frames of all callers: a copy of the state, say."""
    monkeypatch.setattr(ledger, "_PUBLIC", {"torch:_foreach_norm": "torch.nonesuch:norm"})

    def asks():
        mine = torch.zeros(1)
        ledger._look_up.__wrapped__("torch:_foreach_norm")
        return weakref.ref(mine)

    gc.disable()
    try:
        assert asks()() is None
    finally:
        gc.enable()

"""The ledger of private torch names matches the code, both ways, and nothing outside `_torch` uses any."""

import ast
import re
from pathlib import Path

import pytest
import torch

import hotloop
from hotloop._torch import ledger

SOURCE = Path(hotloop.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
PRIVATE_ROOM = SOURCE / "_torch"
# Attributes with an underscore that are no torch names: Python's own, and those of public Python types.
NOT_TORCH = re.compile(r"^__\w+__$|^_(fields|replace|asdict|make|private_to|hotloop\w*)$")
# A path of torch in a string: "torch._dynamo.x", "torch:_Name", or "torch.multiprocessing.reductions:Name".
SINCE = {"torch._C:_override_stale_capture_stream": "2.13", "torch:_foreach_clone": "2.13"}
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
    if torch.__version__ < SINCE.get(name.path, ""):
        pytest.skip(f"since torch {SINCE[name.path]}")
    assert ledger.private(name.path) is not None
    assert name.why
    assert name.without or "exc:" in name.path


def test_a_name_that_is_not_in_the_ledger_is_refused():
    with pytest.raises(KeyError, match="not in the ledger"):
        ledger.private("torch._dynamo:reset")


def test_a_missing_name_is_a_capability_with_a_reason(monkeypatch):
    gone = ledger.PrivateName("torch._dynamo:nonesuch", "a test", "nothing")
    monkeypatch.setattr(ledger, "LEDGER", (*ledger.LEDGER, gone))
    monkeypatch.setattr(ledger, "_PATHS", ledger._PATHS | {gone.path})
    found = ledger.capability("something", gone.path)
    assert not found.available
    assert "without it: nothing" in found.reason

"""The words for recompiles: one problem for each thing that can change."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from hotloop.diagnose.guards import guard_of
from hotloop.diagnose.rule import Problem
from hotloop.diagnose.words import count, several

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotloop.diagnose.guards import Guard
    from hotloop.events import Recompiled

_ONE_MORE = "one more compile"
_recompile = functools.partial(
    Problem,
    rule="recompile",
    cost="one compile for each, up to torch's limit of 8 per function; after that, anything new runs eager",
)

PROBLEMS = (
    _recompile(
        kind="ragged_batch",
        symptom="the last batch of an epoch is smaller",
        cause="code is compiled for exact sizes first. hotloop.compile then adds code for a second batch size and "
        "keeps that of the full batches; torch.compile runs both on one dynamic graph from then on",
        change="nothing if the one compile pays; else drop the odd batch (drop_last=True in the DataLoader), or pad it",
        cost="one more compile; with torch.compile alone also a dynamic graph for all later full batches",
        remedy="odd_batch_eager",
    ),
    _recompile(
        kind="dynamic_lengths",
        symptom="a size varies from batch to batch",
        cause="code is compiled for exact sizes first; torch makes a size dynamic at its second value, and with "
        "dynamic=False it compiles once per size",
        change="mark the size dynamic on the first batch (torch._dynamo.mark_dynamic), or pad to a few sizes",
        cost="one more compile; with dynamic=False one for each size",
        remedy="mark_dynamic",
    ),
    _recompile(
        kind="size_relation",
        symptom="the code depends on a size",
        cause="the model compares, divides or branches on a size, so compiled code is valid for a range of sizes only",
        change="move the branch on the size out of the model, or pad batches so that all fall on one side of it",
        cost="one compile for each range",
        remedy="buckets",
    ),
    _recompile(
        kind="int_attribute",
        symptom="an integer on a module or global changes",
        cause="torch treats a module's integers as constants, and compiles once for each value",
        change="keep it as a tensor (a buffer), pass it in as an argument, or count outside the model",
    ),
    _recompile(
        kind="float_attribute",
        symptom="a float on a module or global changes",
        cause="torch treats it as a constant at first, and as an input from its second value on",
        change="keep it as a tensor (a buffer), or pass it in as an argument",
        cost=f"{_ONE_MORE}; one for each value where the code needs it as a constant",
    ),
    _recompile(
        kind="attribute",
        symptom="a setting that the code reads changes",
        cause="torch treats what a module or global holds (a flag, a string, None) as a constant, and compiles once "
        "per value",
        change="set it once before training, or compile a model for each setting",
    ),
    _recompile(
        kind="dropout",
        symptom="a dropout probability changes",
        cause="a dropout probability is a constant of the code, so each value is compiled separately",
        change="keep the probability constant, or write the dropout with its probability in a tensor",
    ),
    _recompile(
        kind="train_eval",
        symptom="the model goes from train() to eval() within one lane",
        cause="modules like Dropout and BatchNorm behave differently then, so each mode has code of its own",
        change="nothing if it happens once; else set the mode once, and evaluate under torch.no_grad(), which has a "
        "lane of its own",
        cost=_ONE_MORE,
    ),
    _recompile(
        kind="grad_mode",
        symptom="gradients, or inference mode, are switched on and off",
        cause="compiled code is for one gradient mode: no_grad and inference_mode have code of their own",
        change="evaluate under torch.no_grad() or torch.inference_mode(), not both, with no tensor that was made in "
        "the other mode",
        cost="one compile for each mode",
    ),
    _recompile(
        kind="threads",
        symptom="the number of threads changes",
        cause="compiled code is for one number of threads",
        change="call torch.set_num_threads once, before the first step; a data loader or library may set it as well",
    ),
    _recompile(
        kind="precision",
        symptom="a dtype or autocast changes",
        cause="code is compiled for exact dtypes, and for autocast on or off",
        change="run every step under the same autocast and with inputs of one dtype",
    ),
    _recompile(
        kind="setting",
        symptom="a global setting of torch's changes",
        cause="compiled code is valid for torch's settings at the time of its compile",
        change="set it once, before the first step",
    ),
    _recompile(
        kind="requires_grad",
        symptom="requires_grad of a parameter or input changes",
        cause="which gradients are computed is part of the compiled code",
        change="nothing if layers are frozen or unfrozen once, or if blocks share their code and the first block's "
        "input needs no gradient; else mask the gradient or use a learning rate of 0",
        cost="one compile for each set of trained parameters",
    ),
    _recompile(
        kind="new_object",
        symptom="a module, function or parameter was replaced by another",
        cause="code is compiled for the very objects that it saw: a new layer, or a class or function that is defined "
        "again, is another object",
        change="change the object in place instead of replacing it, and define classes and functions once, at the top "
        "of a file",
    ),
    _recompile(
        kind="growth",
        symptom="a list or dictionary that the model reads grows",
        cause="the length is a constant of the code, so every step compiles again",
        change="keep the list out of the model: return what you collect, or write into a tensor of fixed size",
    ),
    _recompile(
        kind="modules",
        symptom="modules or hooks are added or removed",
        cause="compiled code is for the modules and hooks that exist at its compile, adapters (LoRA) among them",
        change="nothing if it happens once; else add layers, adapters and hooks before the first step",
        cost=_ONE_MORE,
    ),
    _recompile(
        kind="arguments",
        symptom="arguments of the call that are not tensors change",
        cause="numbers, strings, flags and the lengths of lists are constants of the code; a number becomes an input "
        "at its second value",
        change="pass a tensor if the value varies, and call the model with the same arguments each time",
    ),
    _recompile(
        kind="rank",
        symptom="an input has another number of dimensions",
        cause="compiled code is for one number of dimensions",
        change="reshape inputs to one number of dimensions before the model",
    ),
    _recompile(
        kind="strides",
        symptom="an input has another memory layout",
        cause="code is compiled for an input's layout in memory (a transposed or sliced tensor has another)",
        change="give all inputs one layout before the model: x.contiguous(), or one memory_format",
        cost=_ONE_MORE,
    ),
    _recompile(
        kind="device",
        symptom="an input comes from another device",
        cause="code is compiled for the devices of its inputs",
        change="move inputs to the model's device before it is called",
    ),
    _recompile(
        kind="other",
        symptom="compiled code did not fit",
        cause="something that it depends on has changed",
        change="keep what the guard names the same from call to call",
    ),
)
_WHAT: dict[str, str] = {
    "ragged_batch": "a batch of {last} came where batches had {first} ({subject})",
    "dynamic_lengths": "dimension {dim} of {subject} varies ({values})",
    "size_relation": "the code depends on a size ({subject})",
    "int_attribute": "{subject} changed (it was {values})",
    "float_attribute": "{subject} changed (it was {values})",
    "attribute": "{subject} changed (it was {values})",
    "dropout": "the probability {subject} changed (it was {values})",
    "growth": "the length of {subject} changed (it was {values})",
    "modules": "the modules or hooks inside of {subject} changed",
    "arguments": "argument {subject} changed (it was {values})",
    "setting": "torch's setting {subject} changed",
    "precision": "{subject} changed{change}",
    "rank": "{subject} has another number of dimensions{change}",
    "device": "{subject} is on another device{change}",
    "requires_grad": "requires_grad of {subject} changed",
    "new_object": "{subject} was replaced by another",
    "strides": "{subject} has another memory layout{change}",
    "size": "dimension {dim} of {subject} is another one{change}",
    "other": "compiled code did not fit ({subject})",
}
"""What advice says of a cause; a cause that is not here is told by its symptom."""


def problem_of(kind: str) -> Problem:
    """Return the problem behind a cause."""
    return next((problem for problem in PROBLEMS if problem.kind == kind), PROBLEMS[-1])


def what_of(kind: str, guards: Sequence[Guard]) -> str:
    """Say what changed, with the values in torch's guards, and how many recompiles it caused."""
    return f"{changed(kind, guards)}: {count(len(guards), 'recompile')}"


def changed(kind: str, guards: Sequence[Guard]) -> str:
    """Say what changed, with the values in torch's guards."""
    values = [value for guard in guards for value in guard.values]
    # A set of dispatch keys is shown by its first key, which names the device.
    short = [value.removeprefix("DispatchKeySet(").split(",")[0].rstrip(")") for value in values[:2]]
    subject = several(guard.subject for guard in guards if guard.subject)
    if kind == "arguments" and subject in ("args", "kwargs"):
        return "the call has other arguments than before"
    return _WHAT.get(kind, problem_of(kind).symptom).format(
        subject=subject,
        values=several(values) or "not empty",
        change=f" ({short[0]} to {short[1]})" if len(values) > 1 else "",
        first=values[0] if values else "another size",
        last=values[-1] if values else "another size",
        dim=guards[0].dim,
    )


def words_of(event: Recompiled) -> tuple[str, str]:
    """Return what one recompile says has changed, and what to change."""
    guard = guard_of(event)
    # Only further recompiles show whether a size is a ragged batch or a length, and what a break left behind.
    alone = {"size": "dynamic_lengths", "break_value": "other"}
    return changed(guard.cause, [guard]), problem_of(alone.get(guard.cause, guard.cause)).change

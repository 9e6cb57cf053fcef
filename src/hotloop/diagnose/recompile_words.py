"""The words for recompiles: one problem for each thing that can change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.diagnose.guards import guard_of
from hotloop.diagnose.problem import Problem
from hotloop.diagnose.words import count, several

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotloop.diagnose.guards import Guard
    from hotloop.events import Recompiled
    from hotloop.remedies import Remedy

_ONE_EACH = "one compile for each, until torch's limit of 8 a function; then unseen ones run eager"
_ONE_MORE = "one compile more"


def _problem(  # noqa: PLR0913 - a problem has these words
    kind: str, symptom: str, cause: str, change: str, *, cost: str = _ONE_EACH, remedy: Remedy | None = None
) -> Problem:
    return Problem(rule="recompile", kind=kind, symptom=symptom, cause=cause, cost=cost, change=change, remedy=remedy)


PROBLEMS = (
    _problem(
        "ragged_batch",
        "the last batch of an epoch is smaller",
        "code is compiled for exact sizes first; hotloop.compile makes code of its own for a second batch size and "
        "leaves the full batches theirs, torch.compile runs them on one dynamic graph from then on",
        "leave it where the one compile pays; else drop the odd batch (drop_last=True in the DataLoader), or pad it",
        cost="one compile more; with torch.compile alone also a dynamic graph for all later full batches",
        remedy="odd_batch_eager",
    ),
    _problem(
        "dynamic_lengths",
        "a size varies from batch to batch",
        "code is compiled for exact sizes first; torch makes a size dynamic at its second value, and with "
        "dynamic=False it compiles once a size",
        "mark the size dynamic on the first batch (torch._dynamo.mark_dynamic), or pad to a few sizes",
        cost="one compile more; with dynamic=False one for each size",
        remedy="mark_dynamic",
    ),
    _problem(
        "size_relation",
        "the code depends on a size",
        "the model compares, divides or branches on a size, so that code is right for a range of sizes only",
        "take the branch on the size out of the model, or pad batches so that all fall on one side of it",
        cost="one compile for each range",
        remedy="buckets",
    ),
    _problem(
        "int_attribute",
        "a whole number on a module or global changes",
        "torch takes a module's whole numbers for constants, and compiles once for each value",
        "keep it as a tensor (a buffer), pass it in as an argument, or count outside the model",
    ),
    _problem(
        "float_attribute",
        "a float on a module or global changes",
        "torch takes it for a constant, and makes it an input at its second value",
        "keep it as a tensor (a buffer), or pass it in as an argument",
        cost=f"{_ONE_MORE}; one for each value where the code needs it as a constant",
    ),
    _problem(
        "attribute",
        "a setting that the code reads changes",
        "torch takes what a module or global holds (a flag, a text, None) for a constant, and compiles once a value",
        "set it once before training, or compile a model for each setting",
    ),
    _problem(
        "dropout",
        "a dropout probability changes",
        "a dropout probability is a constant of the code, so each value is compiled apart",
        "keep the probability constant, or write the dropout with its probability in a tensor",
    ),
    _problem(
        "train_eval",
        "the model goes from train() to eval() within one lane",
        "modules like Dropout and BatchNorm do something else then, so each mode has code of its own",
        "nothing where it happens once; else set the mode once, and evaluate under torch.no_grad(), which has a lane "
        "of its own",
        cost=_ONE_MORE,
    ),
    _problem(
        "grad_mode",
        "gradients, or inference mode, are switched on and off",
        "compiled code is for one gradient mode: no_grad and inference_mode have code of their own",
        "use one of them for all evaluation: torch.no_grad() or torch.inference_mode(), not both, and no tensor made "
        "in the other one",
        cost="one compile for each mode",
    ),
    _problem(
        "threads",
        "the number of threads changes",
        "compiled code is for one number of threads",
        "call torch.set_num_threads once, before the first step; a data loader or library may set it as well",
    ),
    _problem(
        "precision",
        "a dtype or autocast changes",
        "code is compiled for exact dtypes, and for autocast on or off",
        "run every step under the same autocast and with inputs of one dtype",
    ),
    _problem(
        "setting",
        "a global setting of torch's changes",
        "compiled code is for torch's settings as they were when it was compiled",
        "set it once, before the first step",
    ),
    _problem(
        "requires_grad",
        "requires_grad of a parameter or input changes",
        "which gradients are computed is part of the compiled code",
        "nothing where layers are frozen or thawed once; else mask the gradient or use a learning rate of 0",
        cost="one compile for each set of trained parameters",
    ),
    _problem(
        "new_object",
        "another module, function or parameter stands in its place",
        "code is compiled for the objects that it saw: a new layer, or a class or function made anew, is another one",
        "change the object that is there instead of replacing it, and define classes and functions once, at the top of "
        "a file",
    ),
    _problem(
        "growth",
        "a list or dictionary that the model reads grows",
        "its length is a constant of the code, so every step compiles anew",
        "keep the list out of the model: return what you collect, or write into a tensor of fixed size",
    ),
    _problem(
        "modules",
        "modules or hooks are added or taken out",
        "compiled code is for the modules and hooks that there are, adapters (LoRA) among them",
        "nothing where it happens once; else add layers, adapters and hooks before the first step",
        cost=_ONE_MORE,
    ),
    _problem(
        "arguments",
        "the call's arguments that are no tensors change",
        "numbers, texts, flags and the lengths of lists are constants of the code; a number becomes an input at its "
        "second value",
        "pass a tensor where the value varies, and call the model with the same arguments each time",
    ),
    _problem(
        "rank",
        "an input has another number of dimensions",
        "code is compiled for a number of dimensions",
        "reshape inputs to one number of dimensions before the model",
    ),
    _problem(
        "strides",
        "an input lies in memory in another way",
        "code is compiled for the order of an input in memory (a transposed or sliced tensor has another)",
        "make inputs alike before the model: x.contiguous(), or one memory_format",
        cost=_ONE_MORE,
    ),
    _problem(
        "device",
        "an input comes from another device",
        "code is compiled for the devices of its inputs",
        "move inputs to the model's device before it is called",
    ),
    _problem(
        "other",
        "compiled code did not fit",
        "something that it depends on has changed",
        "keep what the guard names the same from call to call",
    ),
)
_BY_KIND = {problem.kind: problem for problem in PROBLEMS}


def problem_of(kind: str) -> Problem:
    """Give the problem behind a cause."""
    return _BY_KIND.get(kind, _BY_KIND["other"])


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
    "strides": "{subject} lies in memory in another way{change}",
    "size": "dimension {dim} of {subject} is another one{change}",
    "other": "compiled code did not fit ({subject})",
}
"""What is said of a cause; of those that are not here, the symptom is said."""


def what_of(kind: str, guards: Sequence[Guard]) -> str:
    """Say what changed, with the values that torch told, and how many recompiles came of it."""
    return f"{changed(kind, guards)}: {count(len(guards), 'recompile')}"


def changed(kind: str, guards: Sequence[Guard]) -> str:
    """Say what changed, with the values that torch told."""
    values = [value for guard in guards for value in guard.values]
    subject = several(guard.subject for guard in guards if guard.subject)
    if kind == "arguments" and subject in ("args", "kwargs"):
        return "the call has other arguments than before"
    return _WHAT.get(kind, problem_of(kind).symptom).format(
        subject=subject,
        values=several(values) or "not empty",
        change=f" ({_short(values[0])} to {_short(values[1])})" if len(values) > 1 else "",
        first=values[0] if values else "another size",
        last=values[-1] if values else "another size",
        dim=guards[0].dim,
    )


def words_of(event: Recompiled) -> tuple[str, str]:
    """Give what changed, of one recompile alone, and what to change."""
    guard = guard_of(event)
    alone = {"size": "dynamic_lengths", "break_value": "other"}  # which kind of sizes these are, further ones tell
    return changed(guard.cause, [guard]), problem_of(alone.get(guard.cause, guard.cause)).change


def _short(value: str) -> str:
    """Give a value of torch's; of a set of dispatch keys the first one, which names the device."""
    return value.removeprefix("DispatchKeySet(").split(",")[0].rstrip(")")

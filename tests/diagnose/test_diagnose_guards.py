"""Guard texts of torch, as 2.13 gives them and as earlier versions do, read as causes."""

from __future__ import annotations

import re

import pytest

from hotloop import events as ev
from hotloop.diagnose.guards import guard_of
from hotloop.diagnose.recompile import words_of

GUARDS = [
    ("tensor 'x' size mismatch at index 0. expected 32, actual 7", "size", "x", ("32", "7")),
    ("tensor 'L['x']' size mismatch at index 1. expected 5, actual 6", "size", "x", ("5", "6")),
    ("2 <= x.size()[0]", "size", "x", ("2 or more", "1")),
    ("2 <= x.size()[0] <= 16", "size_relation", "2 <= x.size()[0] <= 16", ()),
    ("Eq(L['x'].size()[0], L['y'].size()[0])", "size_relation", "Eq(L['x'].size()[0], L['y'].size()[0])", ()),
    ("x.size()[0] == y.size()[0]", "size_relation", "x.size()[0] == y.size()[0]", ()),
    ("module.n == 3", "attribute", "n", ("3",)),
    ("module._modules['sub'].k == 0", "attribute", "sub.k", ("0",)),
    ("L['self']._modules['sub'].k == 0", "attribute", "self.sub.k", ("0",)),
    ("G['__import___main__'].STEP == 2", "attribute", "STEP", ("2",)),
    ("G['STEP'] == 2", "attribute", "STEP", ("2",)),
    ("module.scale == 1.5", "attribute", "scale", ("1.5",)),
    ("module.scale == 1e-05", "attribute", "scale", ("1e-05",)),
    ("module._modules['drop'].p == 0.30000000000000004", "attribute", "drop.p", ("0.30000000000000004",)),
    ("___as_tensor(module._modules['drop'].p).item() == 0.2", "attribute", "drop.p", ("0.2",)),  # torch 2.11
    ("module.attention_dropout == 0.1", "attribute", "attention_dropout", ("0.1",)),
    ("module.phase == 'warm-up'", "attribute", "phase", ("'warm-up'",)),
    ("module._modules['drop'].training == True", "train_eval", "drop.training", ("True",)),
    ("k == True", "arguments", "k", ("True",)),
    ("args[1] == 2", "arguments", "args[1]", ("2",)),
    ("len(xs) == 2", "arguments", "xs", ("2",)),
    ("len(args) == 1", "arguments", "args", ("1",)),
    ("not module.hist", "growth", "hist", ()),
    ("len(module.hist) == 3", "growth", "hist", ("3",)),
    ("len(module.d) != 2", "growth", "d", ("2",)),
    ("len(module._modules) != 2", "growth", "the modules or hooks of the model", ()),
    ("len(module._modules['blocks']._modules) != 2", "growth", "the modules or hooks of blocks", ()),
    ("len(module.__dict__['_modules']['base_model'].__dict__['_modules']['model']._modules['q']._modules['lora_A']._modules) != 1",
     "growth", "the modules or hooks of base_model.model.q.lora_A", ()),
    ("not module.__dict__['_modules']['base_model']._modules['q'].merged_adapters",
     "growth", "base_model.q.merged_adapters", ()),
    ("not ___dict_contains('forward', module._modules['act'].__dict__)", "new_object", "act.forward", ()),
    ("mask is None", "arguments", "mask", ("None",)),
    ("mask is not None", "arguments", "mask", ("not None",)),
    ("module._modules['act'].bias is None", "attribute", "act.bias", ("None",)),
    ("not module._modules['act']._forward_hooks", "growth", "the modules or hooks of act", ()),
    ("not module._modules['act']._backward_hooks", "growth", "the modules or hooks of act", ()),
    ("GLOBAL_STATE changed: grad_mode", "setting", "grad_mode", ()),
    ("GLOBAL_STATE changed: num_threads", "setting", "num_threads", ()),
    ("GLOBAL_STATE changed: autocast(cpu)_enabled", "setting", "autocast(cpu)_enabled", ()),
    ("GLOBAL_STATE changed: default_dtype", "setting", "default_dtype", ()),
    ("GLOBAL_STATE changed: deterministic_algorithms", "setting", "deterministic_algorithms", ()),
    ("tensor 'x' dtype mismatch. expected Float, actual Double", "input", "the dtype of x", ("Float", "Double")),
    ("tensor 'x' rank mismatch. expected 2, actual 3", "input", "the rank of x", ("2", "3")),
    ("tensor 'x' stride mismatch at index 0. expected 8, actual 1", "input", "the stride of x", ("8", "1")),
    ("tensor 'x' requires_grad mismatch. expected requires_grad=0", "input", "the requires_grad of x", ("requires_grad=0",)),
    ("tensor 'module._modules['l']._parameters['weight']' requires_grad mismatch. expected requires_grad=1",
     "input", "the requires_grad of l.weight", ("requires_grad=1",)),
    ("tensor 'module._modules['l']._parameters['bias']' size mismatch at index 0. expected 8, actual 9",
     "new_object", "l.bias", ()),
    ("___check_type_id(module._modules['act'], 0), type=<class 'torch.nn.modules.activation.ReLU'>",
     "new_object", "act", ()),
    ("___check_obj_id(G['loss_fn'], 0)", "new_object", "loss_fn", ()),
    ("tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU, ADInplaceOrView, AutogradCPU), actual DispatchKeySet(CPU)",
     "input", "the device or gradient mode of x", ("CPU", "CPU")),
    ("___stack0 == 5.06", "break_value", "___stack0 == 5.06", ()),
    ("something that no version says", "other", "something that no version says", ()),
]  # fmt: skip


def event(reason, source=""):
    return ev.Recompiled(function="f", file=None, line=None, reason=reason, nth=1, source=source)


@pytest.mark.parametrize(("reason", "cause", "subject", "values"), GUARDS)
def test_a_guard_text_is_read(reason, cause, subject, values):
    guard = guard_of(event(reason))
    assert (guard.cause, guard.subject, guard.values) == (cause, subject, values)


@pytest.mark.parametrize(
    "reason", [one[0] for one in GUARDS if one[1] not in ("other", "break_value", "size_relation")]
)
def test_one_recompile_is_told_in_plain_words_with_a_remedy(reason):
    what, change = words_of(event(reason))
    assert not re.search(r"mismatch|_modules|___|GLOBAL_STATE|L\[|G\[|DispatchKeySet|==|!=", what), what
    assert change
    assert "did not fit" not in what


@pytest.mark.parametrize("reason", ["len(args) == 1", "not kwargs"])
def test_other_arguments_of_the_call_have_no_name(reason):
    assert words_of(event(reason))[0] == "the call has other arguments than before"

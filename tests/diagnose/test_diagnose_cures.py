"""What the advice says to change does fix it: each program with its remedy gives no advice any more."""

from __future__ import annotations

import pytest
from diagnose_documents import PROGRAMS, document_of

from hotloop.diagnose import diagnose

CURES = {
    "graph_break-item": [("y.abs().max().item()", "y.abs().max()")],
    "graph_break-branch": [("        if y.sum() > 0:  # here\n            return y * 2\n        return y", "        return torch.where(y.sum() > 0, y * 2, y)")],
    "graph_break-shape": [("y[y > 0]", "y.masked_fill(y <= 0, 0.0)")],
    "graph_break-print": [("        print(y.shape)  # here\n", "")],
    "graph_break-disabled": [("@torch._dynamo.disable\n", "")],
    "graph_break-call": [('zlib.crc32(b"seed")', "SEED"), ("class Model", 'SEED = zlib.crc32(b"seed")\n\n\nclass Model')],
    "graph_break-self_log": [
        ('        self.log("loss", loss)  # here\n        return loss * 1', '        self.log("loss", loss)\n        return loss'),
        ("model.training_step = hotloop.compile(model.training_step, ", "hotloop.compile(model.linear, "),
    ],
    "frame_eager": [("        try:\n            scale = y.abs().max().item()  # here\n        except RuntimeError:\n            scale = 1.0\n", "        scale = y.abs().max()\n")],
    "frame_eager-raised": [('        if len(x) > 4:\n            raise ValueError("at most 4 rows")  # here\n', "")],
    "recompile-ragged_batch": [("(32, 32, 7, 32)", "(32, 32, 32)")],
    "recompile-dynamic_lengths": [
        (", dynamic=False", ""),
        ("model(torch.randn(4, length, 8))", "x = torch.randn(4, length, 8)\n    torch._dynamo.mark_dynamic(x, 1)\n    model(x)"),
    ],
    "recompile-size_relation": [("(4, 5, 32)", "(4, 5, 15)")],
    "recompile-attribute": [("self.step = 1", 'self.register_buffer("step", torch.tensor(1))'), ("model.step = step", "model.step.fill_(step)")],
    "recompile-train_eval": [("model.eval()\nmodel(torch.randn(4, 8))", "model.eval()\nwith torch.no_grad():\n    model(torch.randn(4, 8))")],
    "recompile-setting": [("(False, True)", "(True, True)")],
    "recompile-growth": [("        self.seen.append(y.detach())  # here\n        return y + sum(self.seen)", "        self.total += y.detach().mean(0)\n        return y + self.total"), ("self.seen = []", 'self.register_buffer("total", torch.zeros(8))')],
    "recompile-arguments": [("self.linear(x) * 2 if double else self.linear(x)", "self.linear(x) * double"), ("(False, True)", "(torch.tensor(1), torch.tensor(2))")],
    "recompile-input": [("model(rows)", "model(rows.contiguous())")],
    "recompile_limit": [("self.step = 1", 'self.register_buffer("step", torch.tensor(1))'), ("model.step = step", "model.step.fill_(step)")],
    "no_effect-bypassed": [("self.forward(x)", "self(x)")],
    "no_effect-transform": [('model = hotloop.compile(loss, "aot_eager")\ntorch.func.grad(model)(torch.ones(4))', 'model = hotloop.compile(torch.func.grad(loss), "aot_eager")\nmodel(torch.ones(4))')],
    "no_effect-container": [
        ('hotloop.compile(model, "aot_eager")', 'whole = hotloop.compile(torch.nn.Sequential(*model), "aot_eager")'),
        ("    x = torch.randn(4, 8)\n    for layer in model:\n        x = layer(x)\n    x.sum()", "    whole(torch.randn(4, 8)).sum()"),
    ],
    "tier_declined": [("        if loss.item() > 100:  # here\n            loss = loss * 0.5\n", "")],
    "capture_dropped": [("if number in (12, 26)", "if number == 12")],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CURES)
def test_the_remedy_mends_it(name, tmp_path):
    if name == "graph_break-self_log":
        pytest.importorskip("lightning")
    text = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8")
    for old, new in CURES[name]:
        assert old in text, f"{name} no longer holds {old!r}"
        text = text.replace(old, new)
    program = tmp_path / f"{name}.py"
    program.write_text(text, encoding="utf-8")
    document = document_of(program)
    assert document["events"]
    found = diagnose(document)
    assert not found, "\n".join(map(str, found))

import io
import time

from rich.console import Console

from hotloop.compiling import observe
from hotloop.train.display import Display, words

ENTRY = {"step": 3, "loss": 0.5, "learning_rate": 1e-4, "seconds": 0.5, "running": "inductor"}


def shown(terminal, act):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=140, highlight=False)
    with Display(console) as display:
        display.begin(100, 0)
        act(display)
    return console.file.getvalue()


def test_a_compile_is_shown_as_such_with_its_seconds(monkeypatch):
    monkeypatch.setattr(observe, "compiling_since", lambda: time.monotonic() - 12)  # whenever it is asked
    assert words("none") == "compiling 12 s"
    assert "compiling 12 s" in shown(True, lambda display: display.running("inductor"))


def test_elsewhere_there_are_plain_lines():
    text = shown(False, lambda display: [display.step({**ENTRY, "step": step}) for step in range(1, 101)])
    assert "\x1b" not in text
    assert len(text.splitlines()) == 21
    assert text.splitlines()[-1].startswith("step 100/100  loss 0.5000  lr 1.00e-04")

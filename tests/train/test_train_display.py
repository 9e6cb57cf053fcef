import io
import time

import pytest
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


def test_a_terminal_gets_a_bar_with_loss_rate_and_what_is_running():
    text = shown(True, lambda display: display.step(ENTRY))
    for part in ("3/100", "loss 0.5000", "lr 1.00e-04", "2.00 steps/s", "inductor"):
        assert part in text


def test_a_compile_is_shown_as_such_with_its_seconds(monkeypatch):
    monkeypatch.setattr(observe, "compiling_since", lambda: time.monotonic() - 12)  # whenever it is asked
    assert words("none") == "compiling 12 s"
    assert "compiling 12 s" in shown(True, lambda display: display.running("inductor"))


def test_elsewhere_there_are_plain_lines():
    text = shown(False, lambda display: [display.step({**ENTRY, "step": step}) for step in range(1, 101)])
    assert "\x1b" not in text
    assert len(text.splitlines()) == 21
    assert text.splitlines()[-1].startswith("step 100/100  loss 0.5000  lr 1.00e-04")


@pytest.mark.parametrize("terminal", [True, False])
def test_square_brackets_are_no_markup(terminal):
    text = shown(terminal, lambda display: display.say("[torch.compile] Disabled (eager execution mode)"))
    assert "[torch.compile] Disabled (eager execution mode)" in text


def test_eager_is_called_eager():
    assert words("none") == "eager"
    assert words("aot_eager") == "aot_eager"

"""The files that docs/architecture.md lists for a captured replay are those that one passes."""

import re
import sys
from pathlib import Path

import torch
from torch import nn

import hotloop
from hotloop.testing import captured_step_emulation

ROOT = Path(__file__).parents[3]
STEP = str(Path(hotloop.__file__).parent / "step") + "/"


def listed():
    """Return the files that the page lists."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    journey = page.partition("**A captured replay**")[2].partition("**A failing compile.**")[0]
    return {one for one in re.findall(r"`([a-z_/]+\.py)`", journey) if not one.startswith("_torch/")}


def test_the_page_lists_what_a_captured_replay_passes():
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters())
    with captured_step_emulation():
        loop = hotloop.Loop(net, optimizer, run="eager+graph")

        @loop.step
        def train_step(rows, wanted):
            optimizer.zero_grad()
            loss = (net(rows) - wanted).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        # The eighth replay is checked, and the sixteenth.
        batches = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(20)]
        for batch in batches[:16]:
            train_step(*batch)
        before, walks = sys.getprofile(), []

        def hear(frame, event, _):
            if event == "call" and frame.f_code.co_filename.startswith(STEP):
                walks[-1].add(frame.f_code.co_filename.removeprefix(STEP))

        for batch in batches[16:]:
            walks.append(set())
            sys.setprofile(hear)
            try:
                train_step(*batch)
            finally:
                sys.setprofile(before)
        assert loop.last_ran() == ("eager+graph", "run")
    assert listed() == set.intersection(*walks)  # in some replays a value is looked at anew, or garbage collected

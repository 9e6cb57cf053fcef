"""The diffusion guide: components that are switched apart, modes in the guide's words, first steps, troubleshooting."""

import html
import json
import re

import pytest
import torch
from guide_programs import MODE, ON, command, compile_lines, the_page
from small_diffusion import small

import hotloop
from hotloop.testing import planted_failure

SMALL = [
    *small(training__ema_decay="null"), "data.sample_size=40", "training.batch_size=8", "training.max_steps=2", ON,
    f"{MODE}=aot_eager", "compile.measure_eager_steps=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with the_page(tmp_path_factory.mktemp("ui") / "runs") as opened:
        yield opened


@pytest.fixture(autouse=True)
def _nothing_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", str(tmp_path / "cache"))


def states(folder):
    components = json.loads((folder / "record.json").read_text())["components"]
    return {name: one["state"] for name, one in components.items()}


@pytest.mark.campaign
def test_the_unet_is_compiled_by_default_alone_and_first_steps_are_told_to_take_longer(tmp_path, capsys):
    assert command("train", *SMALL, f"run.folder={tmp_path / 'run'}") == 0
    said = compile_lines(capsys.readouterr().out)
    assert "the first steps then take longer, which is normal" in said[0]
    found = states(tmp_path / "run")
    assert found["unet"] == "compiled"
    assert found["text_encoder"] == found["vae"] == "eager"


@pytest.mark.campaign
def test_text_encoder_and_vae_are_switched_on_and_the_unet_off(tmp_path):
    more = [f"compile.components.{name}.inference=aot_eager" for name in ("text_encoder", "vae")]
    off = "compile.components.unet.training=none"
    assert command("train", *SMALL, *more, off, "diffusion.cache=false", f"run.folder={tmp_path / 'run'}") == 0
    found = states(tmp_path / "run")
    assert found["text_encoder"] == found["vae"] == "compiled"
    assert found["unet"] == "eager"


@pytest.mark.campaign
def test_a_component_that_cannot_be_compiled_runs_eager_and_the_run_goes_on(tmp_path, capsys):
    with planted_failure("forward compile"):
        assert command("train", *SMALL, f"run.folder={tmp_path / 'run'}") == 0
    assert any("failed" in line and "planted failure" in line for line in compile_lines(capsys.readouterr().out))
    assert states(tmp_path / "run")["unet"] == "eager"


def test_an_unknown_component_is_refused_with_those_that_there_are(tmp_path, capsys):
    wrong = "compile.components.unett.training=none"
    assert command("train", *SMALL, wrong, f"run.folder={tmp_path / 'run'}") == 2
    assert re.search(r"unett.*expected one of unet, text_encoder", capsys.readouterr().err)


def test_the_page_has_the_guides_place_and_words(page):
    text = html.unescape(page("/training?recipe=diffusion"))
    assert "Advanced options" in text
    assert "Compilation" in text
    for mode in ("NONE", "DEFAULT", "INDUCTOR", "TRITON", "AOT_EAGER"):
        assert f">{mode}<" in text, mode
    for column in ("Performance", "Overhead", "Memory", "Best for"):
        assert column in text, column


def test_the_page_switches_each_component_with_the_unet_on(page):
    text = page("/training?recipe=diffusion")
    switches = {
        name: tag
        for tag in re.findall(r'<input type="checkbox"[^>]*>', text)
        for name in ("unet", "text_encoder", "vae")
        if f"{name}." in tag or f'{name}"' in tag
    }
    assert switches.keys() == {"unet", "text_encoder", "vae"}
    assert " checked" in switches["unet"]
    assert " checked" not in switches["vae"]


def test_a_dry_run_takes_every_mode_of_the_guide(tmp_path, capsys):
    for mode in ("none", "default", "inductor", "aot_eager"):
        asked = f"{MODE}={mode}"
        assert command("train", *SMALL, asked, "--dry-run", f"run.folder={tmp_path / mode}") == 0, mode
        assert not (tmp_path / mode).exists()
    capsys.readouterr()
    command("train", *SMALL, f"{MODE}=triton", "--dry-run", f"run.folder={tmp_path / 'triton'}")
    told = capsys.readouterr()
    assert "triton" in told.out + told.err


def test_what_this_machine_cannot_run_is_told_and_steps_down():
    model = torch.nn.Linear(4, 4)
    with hotloop.watch() as events:
        hotloop.compile(model, "triton", ladder=["none"])
        model(torch.randn(2, 4)).sum().backward()
    told = next(one for one in events if one.kind == "unavailable")
    assert "GPU" in told.missing
    assert told.hint
    found = hotloop.status(model).components["model"]
    assert (found.requested, found.running) == ("triton", "none")
    assert "GPU" in found.causes[0].reason


def test_names_of_a_pipeline_compile_the_denoiser_alone_unless_others_are_named():
    parts = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("unet", "text_encoder", "vae")})
    hotloop.compile(parts, {"unet": "aot_eager", "vae": "none", "text_encoder": "none"})
    x = torch.randn(2, 4)
    for one in parts.values():
        one(x).sum().backward()
    assert {name: one.state for name, one in hotloop.status(parts).components.items()} == {
        "unet": "compiled", "text_encoder": "eager", "vae": "eager",
    }  # fmt: skip

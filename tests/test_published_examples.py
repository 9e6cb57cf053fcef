"""Training scripts as people publish them go through the door, and the page says by how many lines they differ."""

import runpy
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotloop.cli import app

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT / "examples" / "published"
pytestmark = pytest.mark.filterwarnings("default")  # the frameworks warn of their own use of torch


def train(tmp_path, name, *settings):
    given = [f"{PUBLISHED / name}.py:make", *settings, f"run.folder={tmp_path / 'run'}"]
    said = CliRunner().invoke(app, ["train", *given])
    assert said.exit_code == 0, said.output


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (
            "nanogpt",
            ["program.layers=1", "program.eval_interval=3", "program.eval_iters=1", "recipe.goal=min:val_loss"],
        ),
        ("diffusers_lora", ["program.rows=64"]),
        pytest.param(
            "transformers_classifier",
            ["program.layers=1", "program.rows=48", "recipe.goal=max:accuracy"],
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_a_script_trains_through_the_door(tmp_path, name, settings):
    train(tmp_path, name, "training.num_epochs=1", *settings)
    assert (tmp_path / "run" / "checkpoints" / "last.pt").is_file()


def test_the_timm_fine_tune_trains_through_the_door(tmp_path):
    pytest.importorskip("timm", reason="timm needs torchvision, which cannot be installed beside torch's CPU build")
    train(tmp_path, "timm_finetune", "training.num_epochs=1", "recipe.goal=max:top1")
    assert (tmp_path / "run" / "checkpoints" / "best.pt").is_file()


def test_the_timm_fine_tune_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # an import of it fails
    with pytest.raises(ModuleNotFoundError, match="pip install timm torchvision"):
        runpy.run_path(str(PUBLISHED / "timm_finetune.py"))


def test_the_page_counts_the_lines():
    table = runpy.run_path(str(PUBLISHED / "count.py"))["table"]()
    page = (ROOT / "docs" / "how-to" / "program.md").read_text()
    assert table in page, (
        f"docs/how-to/program.md: put the table of `python examples/published/count.py` into it:\n{table}"
    )

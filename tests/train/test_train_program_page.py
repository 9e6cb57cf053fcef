"""The programs on docs/how-to/program.md and the pages beside it train as they are pasted."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotloop.cli import app
from hotloop.train import program

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"


def sections(name):
    """Return a page's text by heading."""
    page = (HOW_TO / f"{name}.md").read_text(encoding="utf-8")
    return dict(part.split("\n", 1) for part in f"\n{page}".replace("\n# ", "\n## ", 1).split("\n## ")[1:])


def first_block(page, heading):
    return re.search(r"```python\n(.*?)```", sections(page)[heading], re.DOTALL).group(1)


pytestmark = pytest.mark.filterwarnings("default")  # Lightning warns of its own use of torch


@pytest.mark.parametrize(
    ("page", "heading", "settings"),
    [
        ("program", "A program of your own", ["program.width=8"]),
        ("program-devices", "A program on several devices", ["run.accelerator=cpu"]),
    ],
)
def test_a_program_of_the_page_trains_as_pasted(tmp_path, page, heading, settings):
    (tmp_path / "train.py").write_text(first_block(page, heading))
    given = [f"{tmp_path / 'train.py'}:make", "training.num_epochs=2", "recipe.goal=max:accuracy", *settings]
    said = CliRunner().invoke(app, ["train", *given, f"run.folder={tmp_path / 'run'}"])
    assert said.exit_code == 0, said.output
    judged = CliRunner().invoke(app, ["eval", f"run={tmp_path / 'run'}", "--json"])
    assert judged.exit_code == 0, judged.output


def test_settings_of_the_page_are_plain_numbers(tmp_path):
    (tmp_path / "page.py").write_text(first_block("program-settings", "Its settings"))
    kinds = {one.name: one.default for one in program.load(f"{tmp_path / 'page.py'}:make").parameters}
    assert kinds == {"lr": 1e-3, "kind": "plain", "dropout": None}
    (tmp_path / "page.py").write_text(
        "from typing import Annotated\nimport hotloop\n" + first_block("program-settings", "Searched")
    )
    kinds = {one.name: one.default for one in program.load(f"{tmp_path / 'page.py'}:make").parameters}
    assert kinds == {"lr": 1e-3, "width": 64, "dropout": 0.1}

"""The pages that a reader begins with run as they stand: files are written, Python and commands run, in order."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

START = Path(__file__).parent.parent / "docs" / "start"
PACKAGES = {
    "lightning": "lightning",
    "transformers": "accelerate",
    "diffusion": "diffusers",
    "search": "optuna",
}
BLOCK = re.compile(r'^```(python|bash)(?: title="(.+?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def run_page(name, folder):
    """Run a page's blocks in a folder, and return what its Python printed."""
    printed, program, commands = [], "", []
    for language, title, text in BLOCK.findall((START / f"{name}.md").read_text(encoding="utf-8")):
        if title:
            (folder / title).write_text(text, encoding="utf-8")
        elif language == "python":
            program += text
        else:
            commands += [shlex.split(line) for line in text.splitlines() if not line.startswith("pip install")]
    if program:
        printed.append(ran(["-c", program], folder))
    for command in commands:
        assert command[0] == "hotloop"
        printed.append(ran(["-m", *command], folder))
    return printed


def ran(arguments, folder):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.campaign
def test_ten_minutes(tmp_path):
    python, verify, doctor = run_page("index", tmp_path)
    eager, hot = (re.search(rf"^{name}: (.+)$", python, re.MULTILINE)[1] for name in ("eager", "hot loop"))
    assert eager == hot
    assert "eager stays" in python
    assert (tmp_path / "run.html").is_file()
    assert "passes" in verify
    # What it finds depends on times: on a busy machine the loss, left eager, is next to nothing of a step.
    assert re.search(r"^default: \S+x eager", doctor, re.MULTILINE)


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["own-loop", "lightning", "transformers"])
def test_a_first_page_of_a_trainer(name, tmp_path):
    pytest.importorskip(PACKAGES.get(name, "hotloop"))
    (printed,) = run_page(name, tmp_path)
    assert "hotloop: eager at step" in printed


@pytest.mark.campaign
@pytest.mark.long
def test_diffusion(tmp_path):
    pytest.importorskip(PACKAGES["diffusion"])
    (loop,) = run_page("diffusion", tmp_path)
    assert "hotloop: eager at step 20" in loop


@pytest.mark.campaign
def test_search(tmp_path):
    pytest.importorskip(PACKAGES["search"])
    searched, best, _ = run_page("search", tmp_path)
    assert "4 complete" in searched
    assert "lr" in best


@pytest.mark.campaign
@pytest.mark.filterwarnings("default")  # of the packages that run notebooks
@pytest.mark.parametrize("name", ["own-loop", "doctor-and-verify"])
def test_a_notebook(name, tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="to run notebooks needs pip install 'hotloop[dev]'")
    pytest.importorskip("ipykernel", reason="to run notebooks needs pip install 'hotloop[dev]'")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(START / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("text/html" in output.get("data", ()) for output in outputs), "a result is drawn"
    printed = "".join(output.get("text", "") for output in outputs)
    assert "recompile" in printed if name == "doctor-and-verify" else "0.0" in printed


def test_the_notebooks_are_kept_with_their_output_and_without_paths():
    for page in START.glob("*.ipynb"):
        text = page.read_text(encoding="utf-8")
        assert "text/html" in text
        assert not re.search(r"/(home|root|tmp|work)/", text)


def test_every_first_page_is_run():
    assert {page.stem for page in START.glob("*.md")} == {"index", "own-loop", *PACKAGES}

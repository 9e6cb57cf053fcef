"""What spares a value that a library reads: each row is of a line that the installed library has."""

import importlib.util
from pathlib import Path

import pytest
from torch.nn.utils import clip_grad

from hotloop.diagnose.switches import SWITCHES, switch_at, switch_for

PACKAGES = {"losses": "sentence_transformers", "sentence_transformer": "sentence_transformers"}


def files_of(switch):
    """Return the files of the installed library that a row is about."""
    first = switch.file.partition("/")[0]
    package = PACKAGES.get(first, first)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    home = Path(importlib.util.find_spec(package).origin).parent
    return [path for path in home.rglob("*.py") if switch.file in path.as_posix()]


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: f"{switch.file} {switch.codes[0]}")
def test_the_installed_library_still_reads_there(switch):
    files = files_of(switch)
    assert files
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    missing = [code for code in switch.codes if not any(code in line for line in lines)]
    assert missing == []


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: f"{switch.file} {switch.codes[0]}")
def test_each_row_is_the_first_that_fits_its_lines(switch):
    """Rows of one folder must not take each other's lines."""
    file = switch.file if switch.file.endswith(".py") else f"{switch.file}some/file.py"
    assert {switch_for(f"/site-packages/{file}", f"    {code}") for code in switch.codes} == {switch.words}


def test_a_line_is_looked_up_where_it_can_be_read(tmp_path):
    file = tmp_path / "transformers" / "models" / "speech_to_note.py"
    file.parent.mkdir(parents=True)
    file.write_text("size = x.sum().item()\nif dropout_probability < self.layerdrop:\n")
    assert "layerdrop=0.0" in switch_at(f"a value is read on the host (in {file}:2, which it calls)")
    assert switch_at(f"a value is read on the host (in {file}:1, which it calls)") == ""


def test_a_library_of_torchs_is_named_without_its_folder():
    lines = Path(clip_grad.__file__).read_text(encoding="utf-8").splitlines()
    number = next(number for number, line in enumerate(lines, 1) if "if error_if_nonfinite and" in line)
    place = "a value is read (in torch/nn/utils/clip_grad.py:{}, which it calls)"
    assert "error_if_nonfinite" in switch_at(place.format(number))
    assert switch_at(place.format(number - 1)) == ""
    assert switch_at("a value is read at train.py:3") == ""

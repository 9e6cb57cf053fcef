"""The wheel holds whatever the package reads at run time: templates, scripts, styles, defaults of settings."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "hotloop"


@pytest.mark.campaign
def test_every_file_of_the_package_is_in_the_wheel(tmp_path):
    pytest.importorskip("build", reason="to build the wheel needs pip install 'hotloop[dev]'")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        shipped = {name for name in wheel.namelist() if name.startswith("hotloop/")}
    there = {one for one in PACKAGE.rglob("*") if one.is_file() and "__pycache__" not in one.parts}
    assert {one.relative_to(PACKAGE.parent).as_posix() for one in there} == shipped
    for kind in ("ui/templates/*.j2", "ui/assets/*.js", "ui/assets/*.css", "report/assets/*", "train/conf/*/*.yaml"):
        assert any(Path(name).match(f"hotloop/{kind}") for name in shipped), kind

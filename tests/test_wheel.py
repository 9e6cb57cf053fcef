"""What is shipped: the wheel, the sdist, and an installation of the core alone.

The core is installed into an environment that has the packages which it asks for, and no other: what the tests'
environment has besides cannot be imported there.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import get_args

import pytest
from packaging.requirements import Requirement

import hotloop
from hotloop.train.settings import Logger

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "hotloop"
OPTIONAL = ("integrations", "recipes", "train", "ui")
"""Rooms that may need an extra; the others are the core's."""
pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the sdist, and the wheel from it."""
    pytest.importorskip("build", reason="to build needs pip install 'hotloop[dev]'")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


def test_every_file_of_the_package_is_in_the_wheel(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        shipped = {name for name in wheel.namelist() if name.startswith("hotloop/")}
    there = {one for one in PACKAGE.rglob("*") if one.is_file() and "__pycache__" not in one.parts}
    assert {one.relative_to(PACKAGE.parent).as_posix() for one in there} == shipped
    for kind in ("ui/templates/*.j2", "ui/assets/*.js", "ui/assets/*.css", "report/assets/*", "train/conf/*/*.yaml"):
        assert any(Path(name).match(f"hotloop/{kind}") for name in shipped), kind


def test_every_file_of_the_repository_is_in_the_sdist(built):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git here: an unpacked sdist has nothing to be compared with")
    tracked = {name for name in listed.stdout.splitlines() if not name.startswith((".ci/", ".github/"))}
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        shipped = {name.partition("/")[2] for name in sdist.getnames()}
    assert {name for name in tracked if (ROOT / name).exists()} - shipped == set()


def test_the_version_is_the_packages_own(built):
    assert {one.name.split("-")[1].removesuffix(".tar.gz") for one in built.iterdir()} == {hotloop.__version__}


def needed(name, found):
    """Collect a package and what it asks for, by name."""
    if name in found:
        return found
    try:
        found[name] = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return found  # asked for on other machines, such as torch's packages for CUDA
    for text in found[name].requires or ():
        need = Requirement(text)
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            needed(need.name.lower().replace("_", "-"), found)
    return found


@pytest.fixture(scope="module")
def bare(built, tmp_path_factory):
    """Install the wheel into an environment of its own, beside the packages that the core asks for."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True, with_pip=False)
    packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(packages)
    core = next(packages.glob("hotloop-*.dist-info")) / "METADATA"
    requires = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", core.read_text(encoding="utf-8"), re.MULTILINE)
    assert "torch" in requires
    found = {}
    for name in requires:
        needed(name, found)
    for distribution in found.values():
        for top in {file.parts[0] for file in distribution.files if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    return folder / "bin" / "python"


def ran(bare, *arguments):
    return subprocess.run([bare, *arguments], cwd=bare.parent, capture_output=True, text=True, timeout=900, check=False)


def test_the_core_alone_imports_every_module_or_says_what_to_install(bare):
    program = """
import importlib, json, pkgutil, hotloop
missing = {}
for module in pkgutil.walk_packages(hotloop.__path__, "hotloop.", onerror=lambda name: None):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except Exception as error:
            missing[module.name] = f"{type(error).__name__}: {error}"
print(json.dumps(missing))
"""
    done = ran(bare, "-c", program)
    assert done.returncode == 0, done.stderr
    missing = json.loads(done.stdout)
    assert {name: why for name, why in missing.items() if name.split(".")[1] not in OPTIONAL} == {}
    allowed = re.compile(r"MissingExtraError: .*pip install 'hotloop\[(train|lightning|hf|ui)\]'|ModuleNotFoundError: ")
    assert {name: why for name, why in missing.items() if not allowed.match(why)} == {}
    assert "pip install 'hotloop[lightning]'" in missing["hotloop.integrations.lightning"], (
        "the environment is not bare"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--version"], f"hotloop {hotloop.__version__}"),
        (["presets"], "reduce-overhead"),
        (["train", "train.py:make"], "pip install 'hotloop[train]'"),
        (["hpo"], "pip install 'hotloop[train]'"),
        (["ui"], "pip install 'hotloop[ui]'"),
    ],
)
def test_the_command_line_of_the_core_alone(bare, arguments, says):
    done = ran(bare, "-m", "hotloop", *arguments)
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == (0 if arguments[0] in ("--version", "presets") else 1)


def test_every_extra_that_a_message_names_is_there(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        metadata = wheel.read(f"hotloop-{hotloop.__version__}.dist-info/METADATA").decode()
    extras = set(re.findall(r"^Provides-Extra: (.+)$", metadata, re.MULTILINE))
    code = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    named = set(re.findall(r"hotloop\[([a-z]+)\]", code))
    named |= set(re.findall(r'(?:require|missing_extra)\([^()]*, "([a-z]+)"(?:, error)?\)', code))
    named |= set(get_args(Logger)) - {"csv"}  # each is the extra of its name
    assert {"demo", "postgres", "mlflow", "wandb", "ui", "lightning", "hf"} <= named
    assert named - extras == set()

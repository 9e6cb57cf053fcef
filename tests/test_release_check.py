"""`make release-check` finds each thing that must not be wrong in a release, and nothing in this repository."""

import importlib.util
import io
import re
import shutil
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
if not (ROOT / ".ci").is_dir():
    pytest.skip("an sdist leaves out what builds releases", allow_module_level=True)
SPEC = importlib.util.spec_from_file_location("release_check", ROOT / ".ci" / "release_check.py")
check = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check)
RENDERS = "to render README needs pip install 'hotloop[dev]'"
COPIED = ("README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "SECURITY.md", "src/hotloop/version.py")


@pytest.fixture
def root(tmp_path):
    """Copy what the checks read, so that a test may break it."""
    for name in COPIED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in re.findall(rf"{check.PLACE}/blob/main/([^)#\s]+)", (ROOT / "README.md").read_text(encoding="utf-8")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def change(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_nothing_is_wrong_here():
    pytest.importorskip("readme_renderer", reason=RENDERS)
    pytest.importorskip("comrak", reason=RENDERS)
    assert check.of_version(ROOT, []) + check.of_readme(ROOT) + check.of_files(ROOT) == []


def test_a_tag_of_another_version(root):
    version = check._version(root)
    assert check.of_version(root, ["v9.9.9"])[0] == f"tag v9.9.9, but the version is {version}"
    assert "write the date" in check.of_version(root, [f"v{version}"])[0]
    change(root / "CHANGELOG.md", "(unreleased)", "(2027-01-01)")
    assert check.of_version(root, [f"v{version}", "a-note"]) == []


def test_a_changelog_or_citation_of_another_version(root):
    change(root / "src/hotloop/version.py", '"0.1.0"', '"0.2.0"')
    wrong = check.of_version(root, [])
    assert len(wrong) == 2
    assert "CHANGELOG.md begins with 0.1.0 (unreleased), expected 0.2.0" in wrong[0]
    assert "CITATION.cff" in wrong[1]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("[x](docs/index.md)", "links to docs/index.md: PyPI has no such file"),
        ("![x](docs/images/ui-run.png)", "links to docs/images/ui-run.png"),
        ('<img src="ui.png">', "links to ui.png"),
        (f"[x]({check.PLACE}/blob/main/docs/gone.md#here)", "docs/gone.md, which is not in the repository"),
        (f"![x]({check.RAW}docs/images/gone.png)", "docs/images/gone.png, which is not in the repository"),
    ],
)
def test_a_link_of_readme_that_leads_nowhere(root, more, says):
    pytest.importorskip("readme_renderer", reason=RENDERS)
    pytest.importorskip("comrak", reason=RENDERS)
    shutil.copytree(ROOT / "docs" / "images", root / "docs" / "images")
    with (root / "README.md").open("a", encoding="utf-8") as file:
        file.write(f"\n{more}\n")
    (wrong,) = check.of_readme(root)
    assert says in wrong


def test_a_missing_file(root):
    (root / "SECURITY.md").unlink()
    assert check.of_files(root) == ["SECURITY.md is missing"]


def build(folder, names, files):
    """Write an sdist with these names, and a wheel with these files."""
    with tarfile.open(folder / "hotloop-0.1.0.tar.gz", "w:gz") as sdist:
        for name in names:
            sdist.addfile(tarfile.TarInfo(f"hotloop-0.1.0/{name}"), io.BytesIO())
    with zipfile.ZipFile(folder / "hotloop-0.1.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(f"hotloop-0.1.0.dist-info/{name}", text)


def test_what_lacks_in_an_sdist_or_a_wheel(tmp_path):
    tracked = ["README.md", "constraints.txt", ".ci/run"]
    assert "expected hotloop-" in check.of_built(ROOT, tmp_path, tracked)[0]
    build(tmp_path, ["README.md"], {"METADATA": "License-Expression: Apache-2.0"})
    assert check.of_built(ROOT, tmp_path, tracked) == [
        "constraints.txt is not in the sdist",
        "the wheel has no LICENSE",
        "the wheel's metadata has no Project-URL",
    ]
    whole = {"METADATA": "License-Expression: Apache-2.0\nProject-URL: x", "licenses/LICENSE": ""}
    build(tmp_path, ["README.md", "constraints.txt"], whole)
    assert check.of_built(ROOT, tmp_path, tracked) == []


def test_one_address_is_written_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert all(address.startswith(check.PLACE) for address in project["urls"].values())
    assert f"repo_url: {check.PLACE}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert f"repository-code: {check.PLACE}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_forms_of_issues_and_the_citation_can_be_read():
    forms = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / ".github/ISSUE_TEMPLATE").iterdir()]
    assert len(forms) == 2
    for form in forms:
        assert {"name", "description", "body"} <= form.keys()
        assert all(part["attributes"]["label"] for part in form["body"])
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()

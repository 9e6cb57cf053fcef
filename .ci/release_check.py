"""What must hold before a release: ``make release-check``. It names all that is wrong, and ends with 1 if something is.

- The version is the tag of this commit, or the changelog's newest heading says that it is not released yet.
- README has no relative link, what it links to in the repository is there, and it renders as PyPI renders it.
- Files of the licence, of citation and of security are there, and CITATION.cff has the version.
- The sdist holds every file of the repository, and the wheel its licence and an address of the project.

`make docs` builds the site.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).parent.parent
PLACE = "https://github.com/hotloop/hotloop"
RAW = "https://raw.githubusercontent.com/hotloop/hotloop/main/"
LEFT_OUT = (".ci/", ".github/")
FILES = ("LICENSE", "SECURITY.md", "CITATION.cff", "CHANGELOG.md")


def of_version(root: pathlib.Path, tags: list[str]) -> list[str]:
    """Say what is wrong with the version.

    Args:
        root: of the repository.
        tags: of the commit that is released.
    """
    version = _version(root)
    heading = re.search(r"^## (.+)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    newest = heading[1] if heading else "nothing"
    named = [tag for tag in tags if re.fullmatch(r"v?\d+(\.\d+)+\S*", tag)]
    wrong = [f"tag {tag}, but the version is {version}" for tag in named if tag.removeprefix("v") != version]
    if not newest.startswith(f"{version} ("):
        wrong.append(f"CHANGELOG.md begins with {newest}, expected {version} (a date, or unreleased)")
    elif named and "unreleased" in newest:
        wrong.append(f"CHANGELOG.md says {newest}, but this commit has the tag {named[0]}: write the date")
    citation = root / "CITATION.cff"
    if citation.is_file() and f"\nversion: {version}\n" not in citation.read_text(encoding="utf-8"):
        wrong.append(f"CITATION.cff has another version than {version}")
    return wrong


def of_readme(root: pathlib.Path) -> list[str]:
    """Say what is wrong with README, as PyPI shows it."""
    text = (root / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", prose)
    wrong = []
    for link in (one or other for one, other in links):
        path = link.partition("#")[0]
        inside = next((path.removeprefix(at) for at in (f"{PLACE}/blob/main/", RAW) if path.startswith(at)), None)
        if not link.startswith(("https://", "#")):
            wrong.append(f"README.md links to {link}: PyPI has no such file, write {PLACE}/blob/main/{link}")
        elif inside is not None and not (root / inside).is_file():
            wrong.append(f"README.md links to {inside}, which is not in the repository")
    from readme_renderer import markdown  # noqa: PLC0415 - comes with the extra dev; the other checks need none

    if not markdown.render(text):
        wrong.append("README.md does not render")
    return wrong


def of_files(root: pathlib.Path) -> list[str]:
    """Say which files are missing."""
    return [f"{name} is missing" for name in FILES if not (root / name).is_file()]


def of_built(root: pathlib.Path, folder: pathlib.Path, tracked: list[str]) -> list[str]:
    """Say what is wrong with what was built.

    Args:
        root: of the repository.
        folder: with an sdist and a wheel.
        tracked: the files of the repository.
    """
    version = _version(root)
    sdist, wheel = folder / f"hotloop-{version}.tar.gz", folder / f"hotloop-{version}-py3-none-any.whl"
    if not sdist.is_file() or not wheel.is_file():
        return [f"expected {sdist.name} and {wheel.name}, built {sorted(path.name for path in folder.iterdir())}"]
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    expected = {name for name in tracked if not name.startswith(LEFT_OUT)}
    wrong = [f"{name} is not in the sdist" for name in sorted(expected - names)]
    with zipfile.ZipFile(wheel) as packed_wheel:
        about = f"hotloop-{version}.dist-info"
        metadata = packed_wheel.read(f"{about}/METADATA").decode()
        if f"{about}/licenses/LICENSE" not in packed_wheel.namelist():
            wrong.append("the wheel has no LICENSE")
    return wrong + [
        f"the wheel's metadata has no {need}" for need in ("License-Expression", "Project-URL") if need not in metadata
    ]


def _version(root: pathlib.Path) -> str:
    text = (root / "src/hotloop/version.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def main() -> int:
    """Check, print what is wrong, and return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "build", "--outdir", folder, str(ROOT)], check=True, capture_output=True)
        tracked = _lines("git", "ls-files")
        wrong = of_built(ROOT, pathlib.Path(folder), tracked)
    wrong += of_version(ROOT, _lines("git", "tag", "--points-at", "HEAD")) + of_readme(ROOT) + of_files(ROOT)
    print("\n".join(wrong) if wrong else f"hotloop {_version(ROOT)} can be released")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

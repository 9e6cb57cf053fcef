"""The environment that a cluster without this hotloop gets: a wheel of it, and the versions that are installed here."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import re
import site
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = ".hotloop-submit"
"""In the working folder of a job: the wheel and the versions."""
_THERE = f"${{RAY_RUNTIME_ENV_CREATE_WORKING_DIR}}/{FOLDER}"
_WHEEL = f"hotloop-{__version__}-py3-none-any.whl"
_DEVELOPMENT = ("all", "dev", "docs")


def pip(*, requirements: bool) -> dict[str, Any]:
    """Return what Ray's runtime environment installs by pip.

    Args:
        requirements: the working folder has a ``requirements.txt`` of the user's, which is installed as well.
    """
    extras = f"[{','.join(_extras())}]" if _extras() else ""
    own = ["-r ${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}/requirements.txt"] if requirements else []
    return {"packages": [f"-c {_THERE}/constraints.txt", *own, f"{_THERE}/{_WHEEL}{extras}"], "pip_check": False}


def files() -> dict[str, bytes]:
    """Return the files that `pip` names, by their paths in the working folder."""
    return {f"{FOLDER}/{_WHEEL}": wheel(), f"{FOLDER}/constraints.txt": "\n".join(constraints()).encode()}


def sources() -> dict[str, bytes]:
    """Return the files of this hotloop, by their paths."""
    package = Path(__file__).parents[1]
    found = sorted(path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {f"hotloop/{path.relative_to(package).as_posix()}": path.read_bytes() for path in found}


def digest() -> str:
    """Return the checksum of this hotloop's files: its version is the same in every checkout."""
    made = hashlib.sha256()
    for name, data in sources().items():
        made.update(f"{name} {hashlib.sha256(data).hexdigest()}\n".encode())
    return made.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of what hotloop names as its requirements and is installed here."""
    named = {re.split(r"[\s\[<>=!~;(]", one, maxsplit=1)[0] for one in importlib.metadata.requires("hotloop") or ()}
    return {one: importlib.metadata.version(one) for one in sorted(named - {"hotloop"}) if _installed(one)}


def wheel() -> bytes:
    """Return a wheel of this hotloop, from the files that run here."""
    about = f"hotloop-{__version__}.dist-info"
    content = sources()
    installed = importlib.metadata.distribution("hotloop")
    about_it = installed.read_text("METADATA") or ""
    described = re.sub(r"^Version: .*$", f"Version: {__version__}", about_it, flags=re.MULTILINE)
    content[f"{about}/METADATA"] = described.encode()
    content[f"{about}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: hotloop\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content[f"{about}/entry_points.txt"] = (installed.read_text("entry_points.txt") or "").encode()
    rows = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in content.items()]
    content[f"{about}/RECORD"] = "\n".join([*rows, f"{about}/RECORD,,", ""]).encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)  # of 1980: the same bytes each time
    return made.getvalue()


def constraints() -> list[str]:
    """Return the versions that are installed here, as pip's constraints. What torch was built for is not part of it.

    Packages bring copies of others, which nothing else imports: setuptools and Ray put theirs on Python's path.
    """
    places = [one for one in (*site.getsitepackages(), site.getusersitepackages()) if one in sys.path]
    found = dict[str, str]()
    for one in importlib.metadata.distributions(path=places):
        found.setdefault(one.name.lower(), one.version.partition("+")[0])
    return [f"{name}=={version}" for name, version in sorted(found.items()) if name != "hotloop"]


def _extras() -> list[str]:
    """Return the extras of hotloop of which all is installed here."""
    given = importlib.metadata.metadata("hotloop").get_all("Provides-Extra") or []
    return [extra for extra in given if extra not in _DEVELOPMENT and all(map(_installed, _needed(extra)))]


def _needed(extra: str) -> Iterator[str]:
    for line in importlib.metadata.requires("hotloop") or ():
        if re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", line):
            yield re.split(r"[\s\[<>=!~;(]", line, maxsplit=1)[0]


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()

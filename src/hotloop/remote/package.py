"""What travels to a cluster: the files that git tracks in this folder, and what is named; never secrets or ``.git``."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import stat
import subprocess
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.errors import ConfigError
from hotloop.report.text import count, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

LIMIT_MB = 100
_SECRETS = (
    ".env", ".env.*", ".envrc", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.kdbx", "*.keytab", "id_rsa*", "id_dsa*",
    "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".my.cnf", ".htpasswd",
    ".git-credentials", ".boto", ".s3cfg", ".vault-token", "credentials*", "secret*.json", "secret*.toml",
    "secret*.y*ml", "*secret.json", "service-account*.json", "service_account*.json", "kaggle.json", "auth_token",
)  # fmt: skip
_SECRET_FOLDERS = (
    ".ssh", ".aws", ".azure", ".docker", ".gcloud", ".gnupg", ".huggingface", ".kaggle", ".kube", ".oci", ".secrets",
    "secrets",
)  # fmt: skip
"""All that is in such a folder looks like a secret."""
_NEVER = (".git", "__pycache__", ".venv")
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Package:
    """The files that travel.

    Args:
        root: the folder that they are in; the job starts in a copy of it.
        files: their paths below it, with the bytes of each.
        left_out: those that look like secrets.
        untracked: those that git does not track, and that nobody named.
        links: what is no file: links that lead out of the folder, or to folders, and submodules that are empty.
    """

    root: Path
    files: Mapping[str, int]
    left_out: tuple[str, ...] = ()
    untracked: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Their bytes."""
        return sum(self.files.values())

    def lines(self) -> Iterator[str]:
        """Yield what a person should know of it."""
        yield f"{count(len(self.files), 'file')}, {size(self.size)}, of {self.root}"
        if self.left_out:
            yield f"Left out, since they look like secrets: {_some(self.left_out)} (--include PATH sends a file anyway)"
        if self.untracked:
            yield f"Left here, since git does not track them: {_some(self.untracked)} (git add, or --include PATH)"
        if self.links:
            yield (
                f"Left here, since they are no files of this folder: {_some(self.links)} (links out of it or to "
                "folders: --include what they lead to; submodules: git submodule update --init)"
            )


def collect(root: Path, include: Iterable[str] = (), limit_mb: int = LIMIT_MB) -> Package:
    """Choose what travels.

    Args:
        root: the folder of the program.
        include: files and folders below it that travel although git does not track them.
        limit_mb: most megabytes of all files.

    Raises:
        ConfigError: git knows nothing of the folder and nothing is named, a named path is not there or is outside, or
            the files are too large.
    """
    root = root.resolve()
    named = [_named(root, one) for one in include]
    tracked = _git(root, "ls-files", "-z", "--recurse-submodules")
    if tracked is None and not named:
        raise ConfigError(
            f"{root} is no git repository, so that nothing says what should travel: name it by --include PATH "
            "(--include . takes all of this folder), or run git init and git add"
        )
    found = {one: False for one in tracked or () if (root / one).is_file()}
    found |= {one: exact for path, exact in named for one in _below(root, path)}
    others = {*(_git(root, "ls-files", "-z", "--others", "--exclude-standard") or [])} - found.keys()
    secret = sorted(one for one in {*others, *found} if not found.get(one) and is_secret(one))
    outside = {one for one in found if not (root / one).resolve().is_relative_to(root)}
    # A link to a folder, or a submodule that is not there: neither is a file, and neither vanishes without a word.
    folders = tuple(one for one in tracked or () if one not in found and (root / one).exists())
    sizes = {one: (root / one).stat().st_size for one in sorted(found.keys() - {*secret, *outside})}
    package = Package(root, sizes, tuple(secret), tuple(sorted(others - {*secret})), (*folders, *sorted(outside)))
    if package.size > limit_mb * 10**6:
        largest = sorted(sizes, key=lambda one: -sizes[one])[:_SHOWN]
        raise ConfigError(
            f"--limit-mb {limit_mb}: the files that would travel have {size(package.size)}, the largest are "
            f"{', '.join(f'{one} ({size(sizes[one])})' for one in largest)}. Take them out of git or of --include and "
            "put them where the cluster reads them, or raise --limit-mb"
        )
    if not sizes:
        raise ConfigError(f"nothing travels: git tracks no file in {root}; git add the program, or --include PATH")
    return package


def write(package: Package, target: Path, extra: Mapping[str, bytes] | None = None, most: int | None = None) -> None:
    """Write the files into a zip file that is the same whenever they are, so that Ray takes it once.

    Raises:
        ConfigError: a file cannot be read, or the zip file has more bytes than ``most``.
    """
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in package.files:
            path = package.root / name
            try:
                mode, content = stat.S_IMODE(path.stat().st_mode), path.read_bytes()
            except OSError as error:
                raise ConfigError(f"{path} should travel, and cannot be read: {error}") from error
            archive.writestr(_entry(name, mode), content)
        for name, content in (extra or {}).items():
            archive.writestr(_entry(name), content)
    if most is not None and (length := target.stat().st_size) > most:
        raise ConfigError(
            f"the files that would travel have {size(length)} as a zip file, and Ray takes {size(most)} at most: put "
            "large ones where the cluster reads them, and name them by their path there"
        )


def is_secret(path: str) -> bool:
    """Return whether a file, or a folder that it is in, has a name that secrets usually have."""
    *folders, name = path.lower().split("/")
    if any(fnmatch.fnmatchcase(name, one) for one in _SECRETS):
        return True
    return any(one in _SECRET_FOLDERS for one in folders)


def _entry(name: str, mode: int = 0o644) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)  # of 1980
    entry.external_attr, entry.compress_type = mode << 16, zipfile.ZIP_DEFLATED
    return entry


def _named(root: Path, given: str) -> tuple[Path, bool]:
    """Return a path that was named, and whether it is a file: a secret travels only where its own name was said."""
    path = Path(os.path.abspath(root / given))  # noqa: PTH100 - a link is named as it stands
    if not path.exists():
        raise ConfigError(f"--include {given}: no such file or folder in {root}")
    if not path.is_relative_to(root):
        raise ConfigError(f"--include {given}: expected a path below {root}, where the job has it as well")
    if ".git" in path.relative_to(root).parts:
        raise ConfigError(f"--include {given}: .git never travels; name the files that the program needs")
    return path, path.is_file()


def _below(root: Path, path: Path) -> Iterator[str]:
    if path.is_file():
        yield path.relative_to(root).as_posix()
        return
    for folder, inner, names in os.walk(path):
        inner[:] = sorted(one for one in inner if one not in _NEVER and not Path(folder, one, "pyvenv.cfg").exists())
        yield from (Path(folder, one).relative_to(root).as_posix() for one in names if Path(folder, one).is_file())


def _git(root: Path, *arguments: str) -> list[str] | None:
    """Return the paths that git lists; None outside of a repository, or without git."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)  # noqa: S603, S607
    except FileNotFoundError:
        return None
    if done.returncode:
        return None
    return [os.fsdecode(one) for one in done.stdout.split(b"\0") if one]


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

"""What travels to a cluster: tracked files and named ones; never secrets; and not more than the limit."""

import os
import zipfile
from pathlib import Path

import pytest
from ray_head import git

from hotloop.errors import ConfigError
from hotloop.remote import package


def names(root, include=(), limit_mb=100):
    return set(package.collect(root, include, limit_mb).files)


def test_what_git_tracks_travels_as_it_is_in_the_folder(project, tmp_path):
    Path("inner").mkdir()
    Path("inner/näme with space.txt").write_text("old")
    Path("gone.txt").write_text("x")
    git("add", ".")
    Path("inner/näme with space.txt").write_text("new")
    Path("gone.txt").unlink()
    Path("run.sh").write_text("true")
    Path("run.sh").chmod(0o755)
    git("add", "run.sh")
    packed = package.collect(project)
    assert set(packed.files) == {"train.py", "inner/näme with space.txt", "run.sh"}
    package.write(packed, tmp_path / "one.zip", {"more/x": b"y"})
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        assert archive.read("inner/näme with space.txt") == b"new"
        assert archive.read("more/x") == b"y"
        assert archive.getinfo("run.sh").external_attr >> 16 == 0o755


def test_the_archive_is_the_same_whenever_the_files_are(project, tmp_path):
    package.write(package.collect(project), tmp_path / "one.zip")
    os.utime("train.py", (1, 1))
    package.write(package.collect(project), tmp_path / "two.zip")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()


def test_untracked_files_stay_and_are_said(project):
    Path("new.py").write_text("x")
    packed = package.collect(project)
    assert set(packed.files) == {"train.py"}
    assert any("git does not track them: new.py (git add, or --include PATH)" in line for line in packed.lines())


def test_a_named_folder_travels_without_git_caches_and_environments(project):
    for name in (
        "data/a.csv",
        "data/.git/config",
        "data/__pycache__/x.pyc",
        "data/env/pyvenv.cfg",
        "data/env/lib/x.py",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("x")
    assert names(project, ["data"]) == {"train.py", "data/a.csv"}


@pytest.mark.parametrize(
    "name",
    [
        ".env",
        ".env.local",
        "a/server.pem",
        "id_rsa",
        "id_rsa.pub",
        ".netrc",
        "credentials.json",
        "Credentials",
        "k.key",
    ],
)
def test_what_looks_like_a_secret_is_left_out_and_said(project, name):
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("secret")
    untracked = package.collect(project)
    assert (untracked.left_out, untracked.untracked) == ((name,), ())  # nobody is told to add it
    git("add", "-f", ".")
    packed = package.collect(project, ["."])
    assert set(packed.files) == {"train.py"}
    assert any(f"look like secrets: {name} " in line for line in packed.lines())
    assert names(project, [name]) == {"train.py", name}  # said by its own name


def test_a_link_out_of_the_folder_does_not_travel(project, tmp_path):
    (tmp_path / "outside").write_text("x")
    Path("inside").symlink_to("train.py")
    Path("link").symlink_to(tmp_path / "outside")
    git("add", ".")
    packed = package.collect(project)
    assert set(packed.files) == {"train.py", "inside"}
    assert (packed.links, packed.untracked) == (("link",), ())  # --include would not help


def test_a_tree_above_the_limit_is_refused_with_its_largest_files(project):
    Path("large.bin").write_bytes(b"\0" * 1_500_000)
    Path("small.bin").write_bytes(b"\0" * 600_000)
    git("add", ".")
    with pytest.raises(ConfigError, match=r"--limit-mb 2: .* the largest are large\.bin \(1\.43 MiB\), small\.bin"):
        names(project, limit_mb=2)
    assert "large.bin" in names(project, limit_mb=3)


def test_outside_of_a_repository_somebody_has_to_say_what_travels(tmp_path):
    (tmp_path / "train.py").write_text("x")
    with pytest.raises(ConfigError, match=r"no git repository.*\(--include \. takes all of this folder"):
        package.collect(tmp_path)
    assert names(tmp_path, ["train.py"]) == {"train.py"}


@pytest.mark.parametrize(("given", "said"), [("nowhere", "no such file or folder"), ("..", "expected a path below")])
def test_a_named_path_has_to_be_there_and_below(project, given, said):
    with pytest.raises(ConfigError, match=rf"--include {given}: {said}"):
        package.collect(project, [given])


def test_an_empty_repository_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    with pytest.raises(ConfigError, match="nothing travels: git tracks no file"):
        package.collect(tmp_path)

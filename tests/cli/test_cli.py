import json
import os
import subprocess
import sys

import pytest

import hotloop.cli
from hotloop import files
from hotloop.errors import CompileFailedError, ConfigError, DataError, HotloopError, RecordError


def run(*args):
    with pytest.raises(SystemExit) as stopped:
        hotloop.cli.main(list(args))
    return stopped.value.code or 0


@pytest.mark.parametrize("module", ["hotloop", "hotloop.cli"])
def test_both_modules_are_the_command(module):
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Usage: hotloop " in done.stdout
    assert "report" in done.stdout
    assert "hpo_fast" not in done.stdout  # `hpo --fast`, under the name of a setting


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("hotloop ")


@pytest.mark.parametrize("args", [("unknown",), ("--unknown",), ("report", "a", "b"), ("train", "--lr", "1")])
def test_wrong_usage_is_2_and_says_what(args, capsys):
    assert run(*args) == 2
    assert "Usage: hotloop" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError, 2), (DataError, 2), (RecordError, 2), (CompileFailedError, 1), (HotloopError, 1)]
)
def test_our_errors_are_one_message_without_a_traceback(error, code, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise error("seed 'x': expected a number")

    monkeypatch.setattr(hotloop.cli, "app", fail)
    assert run() == code
    captured = capsys.readouterr()
    assert captured.err == "hotloop: seed 'x': expected a number\n"
    assert not captured.out


def test_errors_of_others_are_not_hidden(monkeypatch):
    monkeypatch.setattr(hotloop.cli, "app", json.loads)  # raises in a file that is no program of the user's
    with pytest.raises(TypeError, match="the JSON object must be"):
        hotloop.cli.main([])


@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def make()\n    pass\n", ['  File "{}", line 1', "SyntaxError: expected ':'"]),
        (
            "def scale():\n    return undefined\n\nscale()\n",
            [
                "Traceback (most recent call last):", '  File "{}", line 4, in <module>', '  File "{}", line 2, in scale',
                "NameError: name 'undefined' is not defined",
            ],
        ),
    ],
)  # fmt: skip
def test_a_program_that_cannot_be_imported_is_shown_without_our_frames(tmp_path, capsys, command, text, said):
    file = tmp_path / "a_program_that_fails.py"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        hotloop.cli.main([command, f"{file}:make"])
    assert ended.value.code == (1 if command == "train" else 3)
    lines = capsys.readouterr().err.splitlines()
    shown = [line for line in lines if line.startswith(("  File", "Trace")) or "Error: " in line]
    assert shown == [line.format(file) for line in said]


@pytest.mark.parametrize(
    "given", [("runs", "list", "NAME"), ("train", "recipe=focus", "run.folder=NAME"), ("train", "--config", "NAME")]
)
def test_a_name_of_5000_letters_is_a_message(given, capsys):
    assert run(*(one.replace("NAME", "a" * 5000) for one in given)) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "characters, which is too long for a file" in said


def test_a_device_is_no_file_of_settings_and_a_pipe_is_one_once_somebody_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.05)
    os.mkfifo(tmp_path / "pipe")
    said = {
        tmp_path / "pipe": "it is a pipe, and its end did not come",
        "/dev/zero": "it is no regular file, but a device",
    }
    for path, why in said.items():
        assert run("train", "recipe=focus", "--config", str(path)) == 2
        assert f"--config {path} cannot be read: {why}" in capsys.readouterr().err
    reader, writer = os.pipe()  # as of <(command)
    os.write(writer, b"training: {batch_size: 7}\n")
    os.close(writer)
    assert run("train", "recipe=focus", "--show", "--config", f"/dev/fd/{reader}") == 0
    assert "batch_size: 7" in capsys.readouterr().out
    os.close(reader)

"""``hotloop ui``: its options, its messages, and what of it is in the package."""

import importlib.resources
import re
import socket
import subprocess
import sys
import urllib.request

import pytest

from hotloop.ui import server
from hotloop.ui.site import STATIC, asset


def ui(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "hotloop", "ui", *arguments], capture_output=True, text=True, timeout=900, check=False
    )


def test_an_address_that_others_reach_is_refused_with_the_way_to_do_it():
    done = ui("--host", "0.0.0.0")
    assert done.returncode == 2
    assert "ssh -L 8765:127.0.0.1:8765" in done.stderr


def test_a_port_that_is_taken_is_said_where_it_was_asked_for(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = ui(str(tmp_path), "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "cannot be used" in done.stderr


def test_a_file_is_no_folder_of_runs(tmp_path):
    (tmp_path / "file").write_text("")
    done = ui(str(tmp_path / "file"))
    assert done.returncode == 2
    assert "expected a folder" in done.stderr


def test_without_its_packages_the_command_says_how_to_install_them():
    code = (
        "import sys; sys.modules['starlette'] = None; sys.argv = ['hotloop', 'ui']\n"
        "from hotloop.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode != 0
    assert "pip install 'hotloop[ui]'" in done.stderr


def test_the_server_loads_no_torch():
    code = "import hotloop.ui.server, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    assert done.stdout.strip() == "False"


def test_the_printed_address_opens_the_page_and_ctrl_c_ends_the_server(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "hotloop", "ui", str(tmp_path / "runs"), "--no-browser", "--port", "0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        with urllib.request.urlopen(url) as answer:
            assert "Go on to hotloop" in answer.read().decode()
    finally:
        process.send_signal(2)
        assert process.wait(300) in (0, 130, -2)
        process.stdout.close()


@pytest.mark.parametrize("name", STATIC)
def test_every_script_and_style_is_there(name):
    content, kind = asset(name)
    assert kind in ("text/css", "text/javascript")
    assert content or name == "uplot.css"


def test_what_is_of_others_has_its_licence_beside_it():
    assets = importlib.resources.files("hotloop.ui") / "assets"
    for name in ("htmx", "sse"):
        assert "Permission to use, copy, modify" in (assets / f"{name}.LICENSE").read_text()
    assert 'version:"2.' in (assets / "htmx.min.js").read_text()


def test_the_browser_gets_the_token_by_a_file_of_its_owner(monkeypatch):
    opened = []
    monkeypatch.setattr(server.webbrowser, "open", opened.append)
    with server._opened("http://127.0.0.1:1/?token=secret"):
        from pathlib import Path
        from urllib.parse import unquote, urlsplit

        file = Path(unquote(urlsplit(opened[0]).path))
        assert "secret" not in opened[0]
        assert "secret" in file.read_text()
        assert file.stat().st_mode & 0o077 == 0
    assert not file.exists()

"""The site: its navigation holds every page, and it builds without a warning."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MADE = [
    f"reference/{name}.md" for name in ("cli", "settings", "catalogue")
]  # by the build; which looks at links to them


class Loose(yaml.SafeLoader):
    """Reads mkdocs.yml without importing what its tags name."""


Loose.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda _loader, name, _node: name)


def pages(part):
    """Yield the pages that a part of the navigation names."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict):
        for inner in part.values():
            yield from pages(inner)
    else:
        for inner in part:
            yield from pages(inner)


def test_the_navigation_holds_every_page_once():
    named = list(pages(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loose)["nav"]))
    there = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*") if page.suffix == ".md"]
    assert sorted(named) == sorted([*there, *MADE])


def anchors(page):
    """Return the anchors of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"\]\([^)]*\)", "", one) for one in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


# The strict build looks at these too, but is no test of every day.
@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.stem)
def test_a_link_into_a_page_meets_a_heading(page):
    links = re.findall(r"\]\(([^)\s#]*\.md)?#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    published = "https://github.com/hotloop/hotloop/blob/main/"
    for target, anchor in links:
        if target.endswith(tuple(MADE)) or (page.parent.name == "reference" and f"reference/{target}" in MADE):
            continue
        near = ROOT / target.removeprefix(published) if target.startswith(published) else page.parent / target
        assert anchor in anchors(near if target else page), f"{target}#{anchor}"


@pytest.mark.parametrize("name", sorted(page.stem for page in (DOCS / "concepts").glob("*.md")))
def test_a_concept_is_short_and_drawn(name):
    text = (DOCS / "concepts" / f"{name}.md").read_text(encoding="utf-8")
    assert text.count("```mermaid\n") == 1
    assert len(text.split()) <= 800


@pytest.mark.parametrize("name", sorted({page.stem for page in (DOCS / "how-to").glob("*.md")}))
def test_a_task_is_read_in_a_few_minutes(name):
    assert len((DOCS / "how-to" / f"{name}.md").read_text(encoding="utf-8").split()) <= 800


def test_the_site_leads_to_notebooks_where_they_are_drawn():
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="start/index.md"))
    config = SimpleNamespace(repo_url="https://example.org/r/")
    made = hooks.on_page_markdown("[a](own-loop.ipynb) [b](lightning.md)", page, config, None)
    assert made == "[a](https://example.org/r/blob/main/docs/start/own-loop.ipynb) [b](lightning.md)"


@pytest.mark.campaign
def test_the_site_builds_without_a_warning(tmp_path):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("to build the site needs pip install 'hotloop[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "index.html").is_file()


@pytest.mark.campaign
def test_the_program_of_several_processes_runs_as_written(tmp_path):
    page = (DOCS / "how-to" / "distributed.md").read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, check=False, timeout=900, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("hotloop: eager") == 2, done.stdout

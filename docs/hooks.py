"""What the build of the site does beside MkDocs: it makes three pages of the code, and leads links to the repository.

A page links to a script or a result as in the repository (``../../examples/digits.py``), so that the link works for
readers of the repository too. The site has no such file. A notebook it has, but a browser shows it as JSON.
"""

import importlib
import logging
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
BRANCH = "main"
GENERATED = {
    "cli": "hotloop.cli.documentation",
    "settings": "hotloop.train.documentation",
    "catalogue": "diagnose_catalogue",
}
log = logging.getLogger("mkdocs.hooks.repository")  # a warning of this logger ends a strict build


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - MkDocs names them
    """Return the page with its links out of ``docs``, and to notebooks, led to the repository."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def published(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link["path"]))
        if target.startswith("docs/") and not target.endswith(".ipynb"):
            return link[0]
        if not (ROOT / target).exists():
            log.warning("%s links to %s, which is not in the repository", page.file.src_uri, link["path"])
        return f"]({config.repo_url.rstrip('/')}/blob/{BRANCH}/{target}{link['anchor'] or ''})"

    return re.sub(r"\]\((?P<path>\.\./[^)\s#]+|[^)\s#:]+\.ipynb)(?P<anchor>#[^)\s]*)?\)", published, markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of the code: commands, settings, and every problem that a rule can find."""
    sys.path.append(str(ROOT / "tests" / "diagnose"))
    for page, module in GENERATED.items():
        content = importlib.import_module(module).render()
        files.append(File.generated(config, f"reference/{page}.md", content=content))
    return files

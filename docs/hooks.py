"""What the build of the site does beside MkDocs: links to files of the repository lead to where it is published.

A page links to a script or a result as in the repository (``../../examples/digits.py``), so that the link works for
readers of the repository too. The site has no such file. A notebook it has, but a browser shows it as JSON.
"""

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
BRANCH = "main"
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

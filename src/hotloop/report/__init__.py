"""Reports of runs, cross-validations and searches, for a terminal and as self-contained HTML pages; without torch."""

from __future__ import annotations

from hotloop.report.page import write_html
from hotloop.report.view import View, build

__all__ = ["View", "build", "write_html"]

"""A base for results that people read: as text in a log, drawn in a terminal, as HTML in a notebook."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, ClassVar

from rich.console import Console

if TYPE_CHECKING:
    from rich.console import RenderableType

_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace">{code}</pre>'


class Shown:
    """A result that its ``__rich__`` draws; ``str`` and notebooks show the same drawing."""

    _columns: ClassVar[int] = 140
    """The width of the drawing, in characters, where no terminal has a width of its own."""

    def __rich__(self) -> RenderableType:
        raise NotImplementedError

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=self._columns, force_terminal=False, force_jupyter=False).print(self)
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        """Return the drawing as HTML, escaped, as Jupyter asks for it."""
        console = Console(file=io.StringIO(), width=self._columns, record=True, force_jupyter=False)
        console.print(self)
        return console.export_html(code_format=_HTML, inline_styles=True)

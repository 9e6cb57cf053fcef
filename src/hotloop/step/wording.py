"""Words for messages."""

from __future__ import annotations


def with_article(name: str) -> str:
    """Put the article before the name of a type."""
    return f"{'an' if name[:1].lower() in tuple('aeiou') else 'a'} {name}"

"""Captioned pictures for recipes that make pictures: sources, sizes by aspect ratio, and the cache of encoded ones."""

from hotloop.recipes.diffusion.pictures.loading import Pictures, load

__all__ = ["Pictures", "load"]

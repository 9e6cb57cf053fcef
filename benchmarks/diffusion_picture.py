"""The picture of docs/how-to/diffusion.md: a row of samples for each of some steps of a run of recipe=diffusion.

usage: hotloop train recipe=diffusion run.folder=RUN diffusion.sample_every=50 diffusion.samples=1
       python benchmarks/diffusion_picture.py RUN OUT.png [STEP ...]
"""

from __future__ import annotations

import argparse
import pathlib

from PIL import Image, ImageDraw, ImageFont

LEFT = 76
"""Pixels for the number of the step."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("steps", type=int, nargs="*", default=(50, 100, 150, 250, 500, 1000))
    options = parser.parse_args()
    rows = [Image.open(options.run / "samples" / f"step-{step:06}.png").convert("L") for step in options.steps]
    sheet = Image.new("L", (LEFT + rows[0].width, sum(one.height for one in rows)), 255)
    draw, font, top = ImageDraw.Draw(sheet), ImageFont.load_default(14), 0
    for step, row in zip(options.steps, rows, strict=True):
        sheet.paste(row, (LEFT, top))
        draw.text((6, top + row.height // 2 - 4), f"step {step}", fill=0, font=font)
        top += row.height
    sheet.quantize(32).save(options.out, optimize=True)


if __name__ == "__main__":
    main()

"""Fashion-MNIST: 60,000 grey pictures of clothes, as Debian's package dataset-fashion-mnist has them (MIT).

Its files are in the format IDX of the MNIST data base (yann.lecun.com/exdb/mnist): two zero bytes, a type (8: bytes),
the number of dimensions, each dimension as 32 bits (most significant byte first), and the values.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from hotloop.errors import DataError
from hotloop.recipes.diffusion.pictures.embedded import caption
from hotloop.recipes.diffusion.pictures.source import Held, Source

FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package puts it."""
IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
CLASSES = (
    "t-shirt", "pair of trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
"""The word of each class, which is part of each of its captions."""
WORDINGS = ("a photo of one {}", "a grey picture of one {}", "one {} on a black background", "one {}")
"""How a picture may be captioned; the first is its class's prompt."""
BRIGHTEST = 255
MOST_BYTES = 2**30
"""Values that a file may claim to hold: the true one holds 47,040,000."""


def load(path: str | None, seed: int) -> Source:
    """Read the 60,000 pictures of the training part; the 10,000 of its test part are left for the user's own tests.

    Args:
        path: the folder of the files; None takes Debian's.
        seed: which picture gets which wording.

    Raises:
        DataError: the files are missing, torn, or no IDX.
    """
    folder = Path(path).expanduser() if path else FOLDER
    missing = [name for name in (IMAGES, LABELS) if not (folder / name).is_file()]
    if missing:
        where = f"pictures.path={path}" if path else f"pictures.source=fashion-mnist: {FOLDER}"
        raise DataError(
            f"{where} has no {' and no '.join(missing)}. Install them with `sudo apt install dataset-fashion-mnist` "
            "(Debian, Ubuntu), or set pictures.path to the folder where they are"
        )
    pixels, labels = read_idx(folder / IMAGES, 3), read_idx(folder / LABELS, 1).tolist()
    if len(pixels) != len(labels) or not labels:
        raise DataError(f"{folder}: {len(pixels)} pictures and {len(labels)} labels: expected as many of each")
    if max(labels) >= len(CLASSES):
        raise DataError(f"{folder / LABELS}: label {max(labels)}, expected 0 to {len(CLASSES) - 1}")
    return Source(
        names=[f"fashion-mnist {row}" for row in range(len(labels))],
        captions=caption(labels, CLASSES, WORDINGS, seed),
        labels=labels,
        prompts=tuple(WORDINGS[0].format(word) for word in CLASSES),
        shapes=[(pixels.shape[1], pixels.shape[2])] * len(labels),
        reader=Held(pixels[:, None], BRIGHTEST),
    )


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read a compressed IDX file of bytes; no more is unpacked than its header says, and that is bounded.

    Args:
        path: of the file.
        dimensions: how many it must have.

    Returns:
        uint8 of the shape that the file says.

    Raises:
        DataError: it is torn, longer than it says, no IDX of bytes, or of another number of dimensions.
    """
    try:
        with gzip.open(path) as file:
            header = file.read(4 + 4 * dimensions)
            if header[:4] != bytes((0, 0, 8, dimensions)) or len(header) < 4 + 4 * dimensions:
                raise DataError(f"{path}: expected an IDX file of bytes with {dimensions} dimensions")
            shape = struct.unpack(f">{dimensions}I", header[4:])
            many = math.prod(shape)
            if many > MOST_BYTES:
                raise DataError(f"{path} claims to hold {many:,} values: expected at most {MOST_BYTES:,}")
            values = bytearray(file.read(many))
            if len(values) < many or file.read(1):
                size = f"{len(values):,}" if len(values) < many else "more"
                raise DataError(f"{path} holds {size} values, where its header says {many:,}")
    except (OSError, EOFError, zlib.error) as error:  # gzip raises each of these for a torn file
        raise DataError(f"{path} cannot be read: {error}") from error
    return torch.frombuffer(values, dtype=torch.uint8).view(shape) if many else torch.empty(shape, dtype=torch.uint8)

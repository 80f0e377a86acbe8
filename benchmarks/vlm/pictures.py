"""Pictures of numbers, rendered by Pillow in its own font, and what is to be read in them.

A number is in a training picture or in a held-out one, never in both.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.vlm.sizes import Sizes

# token ids: of a picture's patches, of the question, and of the digit 0
PATCH, QUESTION, ZERO = 0, 1, 2
# a vocabulary that FP8 GEMMs could take
VOCABULARY = 32
# one number of this many is held out
HELD_OUT = 16


class PictureBatch(NamedTuple):
    """On the CPU."""

    pixels: torch.Tensor
    """uint8 [b, image, image]."""
    tokens: torch.Tensor
    """int64 [b, s]: the patches, the question, and all digits but the last."""
    labels: torch.Tensor
    """int64 [b, digits]: what is read, the next tokens of the last positions."""


class Pictures:
    """Endless pictures in a shuffled order of epochs, which depends on the seed alone."""

    def __init__(self, folder: Path, part: str, sizes: Sizes, seed: int):
        self._pixels = np.load(folder / f"{part}_pixels.npy", mmap_mode="r")
        self._digits = np.load(folder / f"{part}_digits.npy")
        self._sizes, self._seed = sizes, seed
        self._order = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self._digits)

    def batch(self, positions: Iterable[int]) -> PictureBatch:
        """The pictures at these places."""
        chosen = [self._shuffled(p) for p in positions]
        labels = torch.from_numpy(self._digits[chosen]).long() + ZERO
        start = torch.full((len(chosen), self._sizes.patches + 1), PATCH)
        start[:, -1] = QUESTION
        return PictureBatch(
            torch.from_numpy(self._pixels[chosen]), torch.cat((start, labels[:, :-1]), 1), labels
        )

    def micro_batches(
        self, consumed: int, *, global_batch_size: int, micro_batch_size: int
    ) -> Iterator[PictureBatch]:
        """The batch that follows `consumed` pictures, in parts."""
        for first in range(consumed, consumed + global_batch_size, micro_batch_size):
            yield self.batch(range(first, first + micro_batch_size))

    def _shuffled(self, position: int) -> int:
        epoch, place = divmod(position, len(self))
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self)))
        return int(self._order[1][place])


class PictureData(NamedTuple):
    train: Pictures
    held_out: Pictures


def load(folder: Path, sizes: Sizes, seed: int) -> PictureData:
    """What `prepare` has made; the seed decides the order of training pictures."""
    return PictureData(Pictures(folder, "train", sizes, seed), Pictures(folder, "held_out", sizes, 0))


def render(sizes: Sizes, part: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` pictures, uint8 [count, image, image], and their digits, uint8 [count, digits].

    Each is a number of `digits` digits in a random size at a random place, and the same on every call.
    """
    from PIL import Image, ImageDraw, ImageFont

    rng = np.random.default_rng(int(part == "held_out"))
    fonts = [ImageFont.load_default(size) for size in sizes.fonts]
    pixels = np.empty((count, sizes.image, sizes.image), np.uint8)
    digits = np.empty((count, sizes.digits), np.uint8)
    for i in range(count):
        while True:
            text = "".join(map(str, rng.integers(10, size=sizes.digits)))
            if (int(text) % HELD_OUT == 0) == (part == "held_out"):
                break
        font = fonts[rng.integers(len(fonts))]
        left, top, right, bottom = font.getbbox(text)
        x = rng.integers(max(sizes.image - (right - left), 0) + 1) - left
        y = rng.integers(max(sizes.image - (bottom - top), 0) + 1) - top
        picture = Image.new("L", (sizes.image, sizes.image))
        ImageDraw.Draw(picture).text((x, y), text, fill=255, font=font)
        pixels[i], digits[i] = picture, list(map(int, text))
    return pixels, digits


def prepare(folder: Path, sizes: Sizes) -> None:
    """Renders what `load` reads, all or nothing; does nothing if it is there."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent))
    for name, count in (("train", sizes.train), ("held_out", sizes.held_out)):
        for values, kind in zip(render(sizes, name, count), ("pixels", "digits"), strict=True):
            np.save(part / f"{name}_{kind}.npy", values)
    try:
        part.rename(folder)
    except OSError:
        # another process was first
        shutil.rmtree(part)


def name_of(sizes: Sizes) -> str:
    """A name for the folder of what `prepare` makes of these sizes."""
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:8]


def identity(folder: Path) -> dict[str, object]:
    """The hash of all pictures, which other releases of Pillow may draw otherwise."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.npy")):
        found.update(path.read_bytes())
    return {"pictures": found.hexdigest()[:16]}

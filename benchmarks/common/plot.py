"""How plots are written."""

import hashlib
import io
import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo


def save(figure: Figure, path: Path, data: object = None, dpi: int = 120) -> None:
    """Writes a PNG of 64 colors, into a folder that it makes, and closes the figure.

    data: what was drawn, as JSON has it. The PNG holds its digest, so that a test finds an old picture.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    image, text = io.BytesIO(), PngInfo()
    figure.savefig(image, dpi=dpi)
    text.add_text("data", digest(data))
    Image.open(image).convert("RGB").quantize(64).save(path, optimize=True, pnginfo=text)
    plt.close(figure)


def digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def digest_of(path: Path) -> str:
    """The digest of the data that a picture shows."""
    return Image.open(path).text["data"]

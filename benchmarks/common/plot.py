"""How plots are written."""

import io
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG of 64 colors, into a folder that it makes, and closes the figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120)
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)
    plt.close(figure)

"""How plots are written."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG, into a folder that it makes, and closes the figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)

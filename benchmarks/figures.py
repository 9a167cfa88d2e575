"""How pictures for the documentation are made: matplotlib, as SVG, the same numbers giving the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.core.errors import UserError
from specdec.core.extras import how_to_install


def prepare_figures() -> None:
    """Set matplotlib up for pictures of this project.

    Raises:
        UserError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(
            f"--plots needs matplotlib: {how_to_install('train')}, or leave the option out"
        ) from error
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "drafthouse", "svg.fonttype": "none", "font.size": 9})


def new_figure(num_plots: int) -> tuple[Any, Any]:
    """Return a figure and its axes, side by side."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, num_plots, figsize=(4.2 * num_plots, 3.0), squeeze=False)
    return figure, axes[0]


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure and forget it."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path

"""Pictures in one style, drawn by matplotlib, which the extra `demo` brings.

Before: a size. After: a figure to draw on, or one sentence where there is no matplotlib.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quantplug.core.extras import extra_module

_STYLE = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}


def require_pictures() -> None:
    """Makes sure that a picture can be drawn, before the work for it begins.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    extra_module("matplotlib.figure", "demo", "A picture")


@contextmanager
def drawing(width: float, height: float) -> Iterator[Any]:
    """Within it there is a figure of matplotlib's, and what is drawn and saved has the style of all pictures.

    Args:
        width: of the figure, in inches.
        height: of the figure, in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_pictures()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained")

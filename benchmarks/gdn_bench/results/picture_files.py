"""Save figures so that a picture drawn again from the same rows leaves its file alone.

Layout is computed in floating point: machines differ in the sixth decimal of a coordinate, and in how they
smooth an edge of a PNG. A file is written only where the picture differs by more than that.
"""

import re
from io import BytesIO
from pathlib import Path
from typing import Any

COORDINATE = 1e-4  # points by which a coordinate of an SVG may differ
SHADE = 0.02  # of full brightness by which a pixel of a PNG may differ
NUMBER = re.compile(r"(-?\d+(?:\.\d+)?(?:e-?\d+)?)")


def save_svg(figure: Any, path: Path) -> None:
    """Write a figure as SVG unless the file shows the same."""
    from matplotlib import rc_context

    drawn = BytesIO()
    # text stays text, and the file holds neither a date nor random names
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "gdn"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    if not (path.exists() and equal_svg(path.read_text(), drawn.getvalue().decode())):
        path.write_bytes(drawn.getvalue())


def save_png(figure: Any, path: Path, dpi: int) -> None:
    """Write a figure as PNG unless the file shows the same."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi)
    if not (path.exists() and equal_png(path.read_bytes(), drawn.getvalue())):
        path.write_bytes(drawn.getvalue())


def equal_svg(a: str, b: str) -> bool:
    """Return True if two SVG files differ in nothing but noise of coordinates and the version of matplotlib.

    >>> equal_svg("M 52.629146 174.397717", "M 52.629146 174.397718"), equal_svg("M 52.6", "M 52.7")
    (True, False)
    """
    parts = [NUMBER.split(re.sub(r"Matplotlib v[\w.+]+", "", text)) for text in (a, b)]
    if len(parts[0]) != len(parts[1]):
        return False
    return all(x == y or _is_noise(x, y) for x, y in zip(*parts, strict=True))


def _is_noise(x: str, y: str) -> bool:
    """Return True for two coordinates, which have up to six decimals, as no label of an axis has."""
    if not (NUMBER.fullmatch(x) and NUMBER.fullmatch(y)):
        return False
    has_decimals = max(len(number.partition(".")[2]) for number in (x, y)) > 4
    return has_decimals and abs(float(x) - float(y)) <= COORDINATE


def equal_png(a: bytes, b: bytes) -> bool:
    """Return True if two PNG files have the same size and nearly the same pixels."""
    from matplotlib.image import imread

    if a == b:
        return True
    x, y = (imread(BytesIO(data), format="png") for data in (a, b))
    return bool(x.shape == y.shape and abs(x - y).max() <= SHADE)

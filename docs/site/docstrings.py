"""Convert docstrings to Markdown where the site collects them."""

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from pages import docstring_to_markdown


class Docstrings(griffe.Extension):
    """Replace the text of each docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert the docstring of a module, class or function."""
        if obj.docstring is not None:
            obj.docstring.value = docstring_to_markdown(obj.docstring.value)

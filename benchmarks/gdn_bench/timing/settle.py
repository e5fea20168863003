"""Wait for what gdn compiles in the background, so that it takes no time from what is timed."""

import sys


def finish_background() -> None:
    """Compile now what calls of other sizes will need, where this process has called gdn on a GPU."""
    # earlier trees, which `gdn bench compare` measures, compile nothing in the background
    finish = getattr(sys.modules.get("gdn.backends.triton.launch.precompile"), "finish_ahead", None)
    if finish is not None:
        finish()

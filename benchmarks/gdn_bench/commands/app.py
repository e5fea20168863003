"""Gather the commands: one for each benchmark, `cpu`, `ranks`, `links`, `compare`, `verify` and `plot`."""

from gdn_bench.commands.bench import app
from gdn_bench.commands.many import links, ranks
from gdn_bench.commands.plot import plot
from gdn_bench.commands.verify import verify

app.command()(ranks)
app.command()(links)
app.command()(verify)
app.command()(plot)

__all__ = ["app"]

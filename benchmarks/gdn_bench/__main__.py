"""Run the benchmarks without the script `gdn`: python -m gdn_bench."""

from gdn.cli.console import run_app
from gdn_bench.commands.app import app

if __name__ == "__main__":
    run_app(app, "gdn_bench")

"""Run the command line: `gdn`, or python -m gdn without an installed script."""

import sys

CLI_PACKAGES = ("typer", "rich")


def main() -> None:
    """Run `gdn`; where a package of the command line is missing, print in one line how to install it."""
    try:
        from gdn.cli.app import main as run_command
    except ModuleNotFoundError as error:
        if error.name not in CLI_PACKAGES:
            raise
        missing = f"the command line needs {error.name}, which is not installed"
        print(f"gdn: {missing}: pip install 'gdn[cli]'", file=sys.stderr)
        sys.exit(2)
    run_command()


if __name__ == "__main__":
    main()

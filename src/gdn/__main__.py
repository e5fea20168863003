"""python -m gdn: the command line without an installed script."""

from gdn.cli import main

main()

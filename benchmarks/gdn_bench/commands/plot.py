"""`gdn bench plot`: make pictures, the pages of docs/results and the README's table from results files."""

from pathlib import Path
from typing import Annotated

import typer

from gdn.cli.console import console, need_packages
from gdn.cli.environment import CLONE
from gdn_bench.timing import measure

# in a clone its own pages; elsewhere a page in the current folder, and no README
DOCS = measure.ROOT / "docs" / "results.md" if CLONE else measure.ROOT / "results.md"
README = measure.ROOT / "README.md" if CLONE else None


def plot(
    results: Annotated[Path, typer.Option(help="The folder with the JSON-lines files.")] = measure.RESULTS,
    page: Annotated[
        Path, typer.Option(help="The page; pictures and other pages go into a folder of its name.")
    ] = DOCS,
    readme: Annotated[
        Path | None, typer.Option(help="A page whose table between two marks is remade.")
    ] = README,
) -> None:
    """Draw speed, roofline, ratios and errors, and write the pages, from results files alone."""
    need_packages("bench", "matplotlib")
    from gdn_bench.results import pages as files
    from gdn_bench.results import pictures, summary

    try:
        loaded = files.load(results)
    except ValueError as error:
        raise typer.BadParameter(f"results: {error}") from error
    if not loaded:
        raise typer.BadParameter(f"results: expected a folder with JSON-lines files, got {results}")
    folder = page.with_suffix("")
    drawn = {
        one.name: [(title, f"{folder.name}/{file}") for title, file in pictures.draw(one, folder)]
        for one in loaded
    }
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(files.page(loaded, drawn, folder.name), encoding="ascii")
    for job, text in files.pass_pages(loaded, drawn).items():
        (folder / f"{job}.md").write_text(text.replace("../results.md", f"../{page.name}"), encoding="ascii")
    if readme is not None and readme.exists():
        readme.write_text(files.between(readme.read_text(), summary.readme(loaded)))
    for name, titles in drawn.items():
        console.print(f"{name}: {len(titles)} pictures in {folder}", markup=False, highlight=False)
    console.print(f"{page}", markup=False, highlight=False)

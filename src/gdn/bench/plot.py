"""`gdn plot`: pictures, docs/results.md and README's statement, from results files alone."""

from pathlib import Path
from typing import Annotated

import typer

from gdn.bench import measure
from gdn.bench.console import console

DOCS = measure.ROOT / "docs" / "results.md"
README = measure.ROOT / "README.md"


def plot(
    results: Annotated[Path, typer.Option(help="The folder with the JSON-lines files.")] = measure.RESULTS,
    page: Annotated[Path, typer.Option(help="The page; pictures go into a folder of its name.")] = DOCS,
    readme: Annotated[
        Path, typer.Option(help="A page whose statement between two marks is remade.")
    ] = README,
) -> None:
    """Speed against length, roofline, ratios, errors by regime: PNG, SVG, a page, from results files only."""
    from gdn.bench import pictures
    from gdn.bench import results as files

    found = files.load(results)
    if not found:
        raise typer.BadParameter(f"results: expected a folder with JSON-lines files, got {results}")
    folder = page.with_suffix("")
    drawn = {
        one.name: [(title, f"{folder.name}/{file}") for title, file in pictures.draw(one, folder)]
        for one in found
    }
    page.write_text(files.page(found, drawn), encoding="ascii")
    if readme.exists():
        readme.write_text(files.between(readme.read_text(), files.readme(found)))
    for name, titles in drawn.items():
        console.print(f"{name}: {len(titles)} pictures in {folder}", markup=False, highlight=False)
    console.print(f"{page}", markup=False, highlight=False)

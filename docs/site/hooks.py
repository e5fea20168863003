"""Add the pages outside docs/ and the tutorials to the site, and the entries of the lab to its navigation."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
from pages import PAGES, SCRIPTS, relink, script_to_markdown

ROOT = Path(__file__).parents[2]


def on_config(config: Any) -> Any:
    """Replace the navigation's item `lab/*` by the entries that exist, the newest first."""
    entries = sorted((ROOT / "docs" / "lab").glob("[0-9]*.md"), reverse=True)
    listed = [f"lab/{path.name}" for path in entries]
    config.nav = _spread(config.nav, "lab/*", listed)
    return config


def _spread(nav: Any, name: str, listed: list[str]) -> Any:
    if isinstance(nav, dict):
        return {key: _spread(value, name, listed) for key, value in nav.items()}
    if isinstance(nav, list):
        return [x for item in nav for x in (listed if item == name else [_spread(item, name, listed)])]
    return nav


def on_files(files: Files, config: Any) -> Files:
    """Add README.md and its neighbours, and a page for each script."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    tutorials = {f"docs/tutorials/{x.name}": x for x in (ROOT / "docs" / "tutorials").glob("*.py")}
    for source, path in {**tutorials, **{name: ROOT / name for name in SCRIPTS}}.items():
        page = SCRIPTS.get(source, f"tutorials/{path.stem}.md")
        files.append(File.generated(config, page, content=script_to_markdown(path.read_text())))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to pages of the site."""
    target = page.file.src_uri
    sources = {page: source for source, page in {**PAGES, **SCRIPTS}.items()}
    return relink(markdown, sources.get(target, f"docs/{target}"), target, ROOT)

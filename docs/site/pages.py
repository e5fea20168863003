"""Convert docstrings, scripts and links of this repository to Markdown for the documentation site.

Only the standard library is imported, so that tests/test_site.py runs without the generator.
"""

import ast
import posixpath
import re
from pathlib import Path

# files beside docs/ that are pages of the site
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
SCRIPTS = {"examples/serve.py": "tutorials/serve.md"}
HEADS = {"Args": "Arguments", "Example": "Example", "Returns": "Returns", "Parameters": "Parameters"}
TABLES = ("Args", "Parameters")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
# a word, or up to three alone on their line: `Where to read:`
SECTION = re.compile(r"^([A-Z][a-z]+(?:(?: [a-z]+){1,2}(?=:$))?):(.*)$")


def docstring_to_markdown(text: str) -> str:
    """Return a docstring in Markdown: formulas and tables as code blocks, sections under bold heads."""
    blocks = re.split(r"\n\s*\n", text.strip("\n"))
    return "\n\n".join(made for block in blocks for made in _block(block.split("\n")))


def _block(lines: list[str]) -> list[str]:
    """Convert lines between two empty lines."""
    if all(line.startswith("    ") for line in lines):
        return [_fence("text", lines)]
    made: list[str] = []
    while lines:
        # a line at the margin, and the indented lines that belong to it
        end = next((i for i, line in enumerate(lines) if i and not line.startswith(" ")), len(lines))
        made.append(_part(lines[:end]))
        lines = lines[end:]
    # sentences on neighbouring lines are one paragraph
    joined = [made[0]]
    for part in made[1:]:
        is_text = not any(x.startswith(("**", "```")) or "\n" in x for x in (joined[-1], part))
        # a sentence that began on the line of a section's head
        is_text |= part[:1].islower() and "\n" not in joined[-1]
        joined[-1:] = [f"{joined[-1]} {part}"] if is_text else [joined[-1], part]
    return joined


def _part(lines: list[str]) -> str:
    """Convert one line at the margin with the indented lines under it."""
    head = SECTION.match(lines[0])
    if head is None:
        if len(lines) == 1:
            return _escape(lines[0])
        return f"{_escape(lines[0])}\n\n{_fence('text', lines[1:])}"
    name, rest = HEADS.get(head[1], head[1]), head[2].strip()
    if head[1] == "Example":
        return f"**{name}**\n\n{_fence('pycon', lines[1:])}"
    if len(lines) > 1 and (head[1] in TABLES or not rest or "  " in rest):
        # columns: the names of the columns stand on the head's line
        columns = " " * (len(head[1]) + 1) + head[2] if rest else ""
        return f"**{name}**\n\n{_table(columns, lines[1:])}"
    return f"**{name}:** {_escape(' '.join([rest, *(line.strip() for line in lines[1:])]))}"


def _table(head: str, lines: list[str]) -> str:
    """Return rows of aligned columns as a table, or as a code block where a row crosses a column."""
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    first = [line for line in lines if not line[indent:].startswith(" ")]
    starts = [match.start() for match in re.finditer(r"(?<!\S)\S+", head)]
    if not starts:
        # no heads: columns are where those of the first row are
        starts = [match.end() for match in re.finditer(r"(?<=\S) {2,}(?=\S)", first[0])]
    rows: list[list[str]] = []
    for line in lines:
        cells = _cells(line, indent, starts)
        if cells is None:
            return _fence("text", [*([head] if head else []), *lines])
        if line[indent] == " " or (rows and rows[-1][0].endswith(",")):
            # the line goes on with the row above
            rows[-1] = [f"{one} {more}".strip() for one, more in zip(rows[-1], cells, strict=True)]
        else:
            rows.append(cells)
    names = ["", *head.split()]
    table = [f"| {' | '.join(names if head else [''] * len(rows[0]))} |", "|" + "---|" * len(rows[0])]
    for name, *rest in rows:
        cells = [f"`{name}`", *(_escape(cell).replace("|", "\\|") for cell in rest)]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def _cells(line: str, indent: int, starts: list[int]) -> list[str] | None:
    """Return the cells of a line whose columns begin at `starts`; None where one crosses the next one."""
    edges = [indent, *starts]
    if line.endswith(",") and "  " not in line.strip():
        # names alone, which go on in the next line
        return [line.strip(), *("" for _ in starts)]
    if starts and starts[0] < len(line) and line[starts[0] - 1] != " ":
        # a name longer than its column ends at two spaces
        name = re.match(r"\s*\S+(?: \S+)* {2,}", line)
        if name is None or (len(starts) > 1 and name.end() >= starts[1]):
            return None
        edges[1] = name.end()
    if any(start < len(line) and line[start - 1] != " " for start in edges[1:]):
        return None
    return [line[a:b].strip() for a, b in zip(edges, [*edges[1:], None], strict=True)]


def _fence(language: str, lines: list[str]) -> str:
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    body = "\n".join(line[indent:].rstrip() for line in lines)
    return f"```{language}\n{body}\n```"


def _escape(text: str) -> str:
    """Keep Markdown from reading powers, products and comparisons as markup, outside of code spans."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*\[\]])", r"\\\1", part).replace("<", "&lt;")
        for part in parts
    )


def script_to_markdown(text: str) -> str:
    """Return a script as a page: its docstring, then code, with comments that begin `# %%` as text."""
    tree = ast.parse(text)
    docstring = ast.get_docstring(tree) or ""
    assert isinstance(tree.body[0], ast.Expr) and tree.body[0].end_lineno is not None
    title, _, about = docstring.partition("\n")
    page, code, prose = [f"# {title.rstrip('.')}", about.strip("\n")], [], None
    for line in text.splitlines()[tree.body[0].end_lineno :]:
        if line.startswith("# %%"):
            page, code = _with_code(page, code), []
            prose = [line[4:].strip()]
        elif prose is not None and line.startswith("#"):
            prose.append(line[1:].removeprefix(" "))
        else:
            if prose is not None:
                page.append("\n".join(prose))
                prose = None
            code.append(line)
    page += ["\n".join(prose)] if prose is not None else []
    return "\n\n".join(_with_code(page, code)) + "\n"


def _with_code(page: list[str], code: list[str]) -> list[str]:
    body = "\n".join(code).strip("\n")
    return [*page, f"```python\n{body}\n```"] if body else page


def relink(markdown: str, source: str, target: str, root: Path) -> str:
    """Return a page with links that hold on the site.

    source is the page's file in the repository, target its place under docs/. A link to a file that is
    no page of the site becomes the name of that file; a link to nothing stays, and the build reports it.
    """
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.S | re.M)
    return "".join(part if part.startswith("```") else _relink(part, source, target, root) for part in parts)


def _relink(text: str, source: str, target: str, root: Path) -> str:
    def link(match: re.Match[str]) -> str:
        mark, label, path = match.groups()
        file, _, anchor = path.partition("#")
        if not file or re.match(r"[a-z]+:", file):
            return match[0]
        named = posixpath.normpath(posixpath.join(posixpath.dirname(source), file))
        page = PAGES.get(named) or SCRIPTS.get(named)
        if page is None and named.startswith("docs/"):
            page = named.removeprefix("docs/")
            if page.startswith("tutorials/") and page.endswith(".py"):
                page = page.removesuffix(".py") + ".md"
        if page is None:
            return f"{label} (`{named}`)" if (root / named).exists() else match[0]
        beside = posixpath.relpath(page, posixpath.dirname(target) or ".")
        return f"{mark}[{label}]({beside}{'#' + anchor if anchor else ''})"

    return LINK.sub(link, text)

"""Hold the pages and docstrings to the words of docs/glossary.md.

`tests/language.json` counts the retired words of each file, and its docstrings that do not begin with a verb.
A count may only fall: `python tests/test_language.py` lowers each one to the present number and never raises
it. In a page, text in backticks and in indented or fenced blocks is code and is not checked.
"""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXCEPTIONS = ROOT / "tests" / "language.json"
# entries of the lab keep the words of their day; docs/results is made from rows
FREE = ("docs/lab/", "docs/results")

# retired word (a regular expression; a space stands for any white space) -> what to write
RETIRED = {
    r"(?<!streaming\s)multiprocessors?": "SM",
    r"tensor cop(?:y|ies)": "TMA load, TMA store",
    r"(?:programs?|that|walks?|and) stays?(?=[,;:.]| and\b| one\b)": "persistent kernel",
    r"walk(?:s|ed|ing|ers?)?": "state scan, scan",
    r"(?:an?|the|each|both|all|two|one|other) carr(?:y|ies)(?! out\b)": "consumer warpgroup",
    r"chained launch(?:es)?|launches (?:are )?chained|lets? the next begin": "PDL",
    r"call(?:s|ed|ing)? (?:\w+ ){0,4}into the (?:cache|L2)": "prefetch into L2",
    r"in (?:two|2) parts": "split bf16 (hi + lo)",
    r"(?:tame(?:ness)?|glid(?:e|es|ed|ing))": "well-conditioned chunk, fast path",
    r"near chunks?|chunk is near": "chunk whose decay fits fp32",
    r"spans?": "segment",
    r"peak room": "peak memory",
    r"(?:the|its|our) laws?": "reference recurrence",
    r"regimes?": "gate and key distributions",
    r"(?:takes?|refuse[sd]?) (?:an?|the|this|that|each|every|no) calls?|refused calls?": "supports",
    r"asked first|who takes": "dispatch order",
    r"hears?|heard": "reads",
}
BEGINNINGS = ("What", "Whether", "Of", "As", "Who", "The same")
# a variable or parameter is named by what it is, not by how it was obtained
VAGUE_NAMES = {"found", "known"}

WORDS = {re.compile(rf"\b(?:{key})\b".replace(" ", r"\s+"), re.I): word for key, word in RETIRED.items()}
BEGINS_BADLY = re.compile(rf"(?:{'|'.join(BEGINNINGS)})\b")


def prose(text: str, *, is_page: bool) -> str:
    """Return text with its code blanked out, line by line."""
    if is_page:
        text = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.S | re.M)
        text = re.sub(r"^    .*$", "", text, flags=re.M)
        text = re.sub(r"\]\([^)]*\)", "]", text)
    else:
        text = re.sub(r"^\s*(?:>>>|\.\.\.) .*$", "", text, flags=re.M)
    # code in backticks may go over a line's end, but not over a paragraph's
    return re.sub(r"`(?:[^`\n]|\n(?!\s*\n))*`", lambda m: "`" + "\n" * m[0].count("\n"), text)


def retired(text: str, *, is_page: bool = False, first_line: int = 1) -> list[str]:
    """Return "line: 'word', write ..." for each retired word."""
    clean = prose(text, is_page=is_page)
    found = []
    for pattern, word in WORDS.items():
        for match in pattern.finditer(clean):
            line = first_line + clean.count("\n", 0, match.start())
            found.append((line, f"{line}: {' '.join(match[0].split())!r}, write: {word}"))
    return [message for _, message in sorted(found)]


def docstrings(source: str) -> list[tuple[int, str]]:
    """Return (first line, text) of every docstring of a module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                found.append((node.body[0].lineno, text))
    return sorted(found)


def vague_names(source: str) -> list[str]:
    """Return "line: name" for each assignment to a vague name, and each parameter with one."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [(n.lineno, n.id) for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    names += [(n.lineno, n.arg) for n in nodes if isinstance(n, ast.arg)]
    return [f"{line}: {name}" for line, name in sorted(names) if name in VAGUE_NAMES]


def violations(path: Path) -> dict[str, list[str]]:
    """Return the violations of a page or module by kind, as messages."""
    text = path.read_text()
    if path.suffix == ".md":
        return {"words": retired(text, is_page=True)}
    texts = docstrings(text)
    words = [message for line, doc in texts for message in retired(doc, first_line=line)]
    begins = [
        f"{line}: begins with {doc.split()[0]!r}" for line, doc in texts if BEGINS_BADLY.match(doc.lstrip())
    ]
    names = [] if path.is_relative_to(ROOT / "tests") else vague_names(text)
    return {"words": words, "docstrings": begins, "names": names}


def files() -> list[Path]:
    """Return the pages and modules that are checked."""
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "NOTES.md")]
    folders = ("src", "tests", "benchmarks/gdn_bench", "examples")
    modules = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    every = [*pages, *sorted((ROOT / "docs").rglob("*.md")), *modules]
    return [path for path in every if not str(path.relative_to(ROOT)).startswith(FREE)]


def counted() -> dict[str, dict[str, int]]:
    """Return the number of violations by kind and file, without the files that have none."""
    found: dict[str, dict[str, int]] = {"words": {}, "docstrings": {}, "names": {}}
    for path in files():
        for kind, messages in violations(path).items():
            if messages:
                found[kind][str(path.relative_to(ROOT))] = len(messages)
    return found


def allowed() -> dict[str, dict[str, int]]:
    """Return the recorded exceptions."""
    return json.loads(EXCEPTIONS.read_text())


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_words_and_docstrings(path: Path):
    name = str(path.relative_to(ROOT))
    for kind, messages in violations(path).items():
        limit = allowed()[kind].get(name, 0)
        listing = "\n".join(messages)
        assert len(messages) <= limit, f"{name}: {len(messages)} {kind}, {limit} allowed:\n{listing}"
        assert len(messages) == limit, (
            f"{name}: {kind} fell to {len(messages)}: lower the {limit} in tests/language.json "
            "(python tests/test_language.py does)"
        )


def test_exceptions_name_files_that_exist():
    names = {str(path.relative_to(ROOT)) for path in files()}
    for kind, numbers in allowed().items():
        assert set(numbers) <= names, f"{kind}: {sorted(set(numbers) - names)}"


def test_every_retired_word_is_found():
    """The check finds one example of each retired word, and no word like it."""
    examples = [
        "132 multiprocessors",
        "by tensor\ncopies",
        "a program stays, and takes",
        "the walk",
        "both carries",
        "launches are chained",
        "calls the next tile into the L2",
        "r in two parts",
        "a tame chunk",
        "near chunks",
        "three spans",
        "peak room",
        "the law",
        "all regimes",
        "it takes this call",
        "who takes it",
        "who hears of it",
    ]
    assert len(examples) == len(RETIRED)
    for example, pattern in zip(examples, RETIRED, strict=True):
        assert retired(example), f"{pattern}: not found in {example!r}"
    free = "A streaming multiprocessor carries on; `walk_kernel` and `the\nlaw` stay. Sidewalks are flat."
    assert not retired(free)
    page = "    gdn verify --set regimes\n\n```\nthe walk\n```\n[entry](lab/the-law.md)\n"
    assert not retired(page, is_page=True)
    assert retired("\n\nthe law")[0].startswith("3: 'the law', write")


def test_beginnings_of_docstrings_are_found():
    """The check finds docstrings by their first words, in modules, classes and functions."""
    assert all(map(BEGINS_BADLY.match, ("What is", "The same,", "As", "Whether it")))
    assert not any(map(BEGINS_BADLY.match, ("Offsets", "Assert", "The sum", "Return")))
    source = '"""One."""\nclass X:\n    """Two."""\n    def f():\n        """Three."""\n'
    assert docstrings(source) == [(1, "One."), (3, "Two."), (5, "Three.")]


def test_vague_names_are_found():
    """The check finds variables and parameters, and no attribute, keyword or text."""
    source = "def f(known, x):\n    found: int = x.found\n    for found in g(known=1): 'found'\n"
    assert vague_names(source) == ["1: known", "2: found", "3: found"]


def lower() -> int:
    """Lower the recorded counts to the present ones; return the number of files that exceed their count."""
    before, now = allowed(), counted()
    after: dict[str, dict[str, int]] = {}
    num_over = 0
    for kind, numbers in now.items():
        num_over += sum(count > before[kind].get(name, 0) for name, count in numbers.items())
        kept = {name: min(count, before[kind].get(name, 0)) for name, count in numbers.items()}
        after[kind] = {name: count for name, count in sorted(kept.items()) if count}
    EXCEPTIONS.write_text(json.dumps(after, indent=1) + "\n")
    return num_over


if __name__ == "__main__":
    sys.exit(lower() > 0)

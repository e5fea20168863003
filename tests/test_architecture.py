"""Hold the package to the architecture of CONTRIBUTING.md: the table says which folder may import which."""

import ast
import builtins
import dis
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import CodeType

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "gdn"

# room -> rooms it may import; the picture in CONTRIBUTING.md is drawn from this table
MAY_IMPORT = {
    "notation": set(),
    "settings": set(),
    "problem": {"notation"},
    "reference": {"notation"},
    "backends": {"problem", "notation", "settings"},
    "ops": {"backends", "problem", "reference", "notation", "settings"},
    "distributed": {"ops", "notation"},
    "layers": {"ops", "distributed", "problem", "notation"},
    "integrations": {"layers", "ops"},
    "bench": {
        "integrations",
        "layers",
        "ops",
        "backends",
        "problem",
        "reference",
        "notation",
        "settings",
        "gdn",
    },
    "cli": {
        "bench",
        "integrations",
        "layers",
        "ops",
        "backends",
        "problem",
        "reference",
        "notation",
        "settings",
        "gdn",
    },
    "__main__": {"cli"},
    "__init__": {"layers", "ops", "integrations"},
}
BACKENDS = {"eager": set(), "triton": {"eager"}, "hopper": {"triton"}}
FORBIDDEN = {"triton": {"backends/triton", "backends/hopper"}, "transformers": {"integrations", "bench"}}


def imports(path: Path) -> set[str]:
    """Return the dotted names that a file imports, anywhere in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def arrows(root: Path = PACKAGE) -> set[tuple[str, str, str]]:
    """Return (file, folder, imported folder) for every import inside the package; "gdn" is its top level."""
    result = set()
    rooms = {p.name.removesuffix(".py") for p in root.iterdir()}
    for path in root.rglob("*.py"):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "gdn":
                target = parts[1] if len(parts) > 1 and parts[1] in rooms else "gdn"
                where = path.relative_to(root)
                result.add((str(where), where.parts[0].removesuffix(".py"), target))
    return result


def wrong(found: set[tuple[str, str, str]]) -> list[str]:
    """Return the imports that the table does not allow."""
    return sorted(f"{file}: {a} -> {b}" for file, a, b in found if a != b and b not in MAY_IMPORT[a])


def test_arrows_point_one_way():
    assert not wrong(arrows())


def test_the_table_has_no_circle():
    def reach(start: str, seen: frozenset[str]) -> None:
        assert start not in seen, f"circle through {start}"
        for target in MAY_IMPORT.get(start, ()):
            reach(target, seen | {start})

    for source in MAY_IMPORT:
        reach(source, frozenset())


def test_backends_know_only_whom_they_overlay():
    for name, allowed in BACKENDS.items():
        for path in (PACKAGE / "backends" / name).rglob("*.py"):
            for target in imports(path):
                parts = target.split(".")
                if parts[:2] == ["gdn", "backends"] and len(parts) > 2 and parts[2] in BACKENDS:
                    assert parts[2] == name or parts[2] in allowed, f"{path.name}: {name} -> {parts[2]}"


def test_heavy_packages_stay_in_their_rooms():
    for path in PACKAGE.rglob("*.py"):
        where = str(path.relative_to(PACKAGE))
        for package, homes in FORBIDDEN.items():
            if any(name.split(".")[0] == package for name in imports(path)):
                assert any(where.startswith(home) for home in homes), f"{where} imports {package}"


def test_only_settings_reads_the_environment():
    for path in PACKAGE.rglob("*.py"):
        if path.name != "settings.py":
            assert "os.environ" not in path.read_text() and "getenv" not in path.read_text(), path


def test_a_wrong_arrow_is_seen(tmp_path: Path):
    """The check finds a reference that imports a layer."""
    for name in ("layers", "reference"):
        (tmp_path / name).mkdir()
    (tmp_path / "reference" / "law.py").write_text("from gdn.layers.norm import x\n")
    assert wrong(arrows(tmp_path)) == ["reference/law.py: reference -> layers"]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_source_is_ascii_and_short(path: Path):
    text = path.read_text()
    assert text.isascii()
    assert text.count("\n") <= 400
    long = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            # a public docstring's table is no code: counted from the first statement after it
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            lines = (node.end_lineno or 0) - first.lineno
            if lines > (150 if is_kernel(node) else 60):
                long[node.name] = lines
    assert not long


def is_kernel(function: ast.FunctionDef) -> bool:
    """Return True if a function is compiled for a GPU."""
    return any(ast.unparse(d).split(".")[-1] in ("kernel", "jit") for d in function.decorator_list)


def unknown(code: CodeType, known: set[str]) -> set[str]:
    """Return the global names that some code reads and that its module does not define."""
    found = {x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"} - known
    return found.union(*(unknown(x, known) for x in code.co_consts if isinstance(x, CodeType)))


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_every_name_is_known(path: Path):
    """Every global name is defined. Linters miss some, since the shapes in annotations are strings."""
    if path.name == "__main__.py":
        pytest.skip("runs when imported")
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    try:
        module = import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    except ImportError as e:
        pytest.skip(str(e))
    code = compile(path.read_text(), str(path), "exec")
    assert not unknown(code, {*vars(module), *vars(builtins)})
    assert unknown(compile("def f(): return what", "", "exec"), set(vars(builtins))) == {"what"}


def test_import_is_light():
    """`import gdn` imports no Triton, Transformers or command line, and takes at most 0.5 s after torch."""
    code = (
        "import torch, sys, time; sys.modules['triton'] = None; t = time.process_time(); import gdn; "
        "dt = time.process_time() - t; "
        "heavy = [m for m in ('transformers', 'typer', 'rich', 'matplotlib', 'fla') if m in sys.modules]; "
        "assert not heavy, heavy; assert dt < 0.5, dt; print(dt)"
    )
    best = min(float(_python(code)) for _ in range(3))
    assert best < 0.5


def test_a_cpu_call_imports_no_kernel():
    """Every function runs on CPU tensors without Triton, forward and backward."""
    code = (
        "import sys; sys.modules['triton'] = None; import torch, gdn; "
        "x = torch.ones(1, 3, 2, 4, requires_grad=True); "
        "g = torch.zeros(1, 3, 2); gdn.chunk_gated_delta_rule(x, x, x, g, g)[0].sum().backward(); "
        "gdn.rms_norm_gated(x).sum().backward(); gdn.gate(g, g, g[0, 0], None); x = x.detach(); "
        "gdn.causal_conv1d(x[..., 0], x[0, :2, 0]); gdn.decode(x, x, x, torch.zeros(1, 2, 4, 4)); "
        "gdn.fused_recurrent_gated_delta_rule(x, x, x); gdn.explain(x, x, x); "
        "print([m for m in sys.modules if m.startswith('gdn.backends.triton.')])"
    )
    assert _python(code).strip() == "[]"


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout

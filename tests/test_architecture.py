"""The picture of the house, enforced: which room may import which."""

import ast
import builtins
import dis
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import CodeType

import pytest

import gdn
from gdn import notation

PACKAGE = Path(__file__).parent.parent / "src" / "gdn"

# room -> rooms it may import; the picture in CONTRIBUTING.md is drawn from this table
MAY_IMPORT = {
    "notation": set(),
    "settings": set(),
    "_torch_compat": set(),
    "problem": {"notation", "_torch_compat"},
    "reference": {"notation"},
    "backends": {"problem", "notation", "settings", "_torch_compat"},
    "ops": {"backends", "problem", "reference", "notation", "settings", "_torch_compat"},
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
    """Dotted names a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def arrows(root: Path = PACKAGE) -> set[tuple[str, str, str]]:
    """(file, room, imported room) for every import of the package within itself; "gdn" is its front door."""
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
    """The arrows that the table does not hold."""
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
    """The check itself can fail: a backend that reaches for a layer."""
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
    """Whether it is compiled for a GPU."""
    return any(ast.unparse(d).split(".")[-1] in ("kernel", "jit") for d in function.decorator_list)


def unknown(code: CodeType, known: set[str]) -> set[str]:
    """Names that some code looks up among its module's and finds in none."""
    found = {x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"} - known
    return found.union(*(unknown(x, known) for x in code.co_consts if isinstance(x, CodeType)))


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_every_name_is_known(path: Path):
    """Linters cannot tell: shapes in annotations are strings of names that nobody defines."""
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
    """`import gdn` brings no Triton, Transformers or command line, and takes under 0.5 s beyond torch."""
    code = (
        "import torch, sys, time; sys.modules['triton'] = None; t = time.process_time(); import gdn; "
        "dt = time.process_time() - t; "
        "heavy = [m for m in ('transformers', 'typer', 'rich', 'matplotlib', 'fla') if m in sys.modules]; "
        "assert not heavy, heavy; assert dt < 0.5, dt; print(dt)"
    )
    best = min(float(_python(code)) for _ in range(3))
    assert best < 0.5


def test_a_cpu_call_imports_no_kernel():
    """Triton may not even be installed where every function runs on CPU tensors, forward and backward."""
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


# Parameters that are no tensors, at most, of a function. The signature of a public function is its contract,
# and an integration has that of the function that it stands in for: neither is counted.
BUDGET = 8
# file -> function -> number of parameters; a number may only fall, and an entry goes when it is within budget
OVER_BUDGET = {
    "bench/commands.py": {"compare": 10, "command": 13},
    "bench/verify.py": {"verify": 16},
}
TENSORS = {"Tensor", *(name for name, x in vars(notation).items() if hasattr(x, "array_type"))}


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the parameters of a function that are no tensors, without self, cls and ctx."""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]

    def is_tensor(annotation: ast.expr | None) -> bool:
        return annotation is not None and any(
            isinstance(node, ast.Name) and node.id in TENSORS for node in ast.walk(annotation)
        )

    return [x.arg for x in every if x.arg not in ("self", "cls", "ctx") and not is_tensor(x.annotation)]


def over_budget(
    root: Path, budget: int, is_counted: Callable[[Path, ast.FunctionDef], bool]
) -> dict[str, dict[str, int]]:
    """Return, by file and function, the number of parameters of each counted function above the budget."""
    found: dict[str, dict[str, int]] = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and is_counted(path.relative_to(root), node):
                count = len(parameters(node))
                if count > budget:
                    found.setdefault(str(path.relative_to(root)), {})[node.name] = count
    return found


def is_host_function(where: Path, function: ast.FunctionDef) -> bool:
    """Return True for functions outside backends/ that are neither public nor an integration's."""
    if where.parts[0] in ("backends", "integrations"):
        return False
    is_public = where.parts[0] in ("ops", "layers") and function.name in {*gdn.__all__, "__init__"}
    return not is_public


def test_parameter_budget():
    assert over_budget(PACKAGE, BUDGET, is_host_function) == OVER_BUDGET


def test_a_function_over_the_budget_is_seen(tmp_path: Path):
    """Count options alone: tensors are free, in any annotation."""
    names = ", ".join(f"x{i}: int" for i in range(9))
    code = f"def few(q: Q, g: PerHead | None, t: tuple[Tensor, ...], n): ...\ndef many({names}): ...\n"
    (tmp_path / "problem").mkdir()
    (tmp_path / "problem" / "new.py").write_text(code)
    assert over_budget(tmp_path, BUDGET, is_host_function) == {"problem/new.py": {"many": 9}}
    assert over_budget(tmp_path, 0, is_host_function)["problem/new.py"] == {"few": 1, "many": 9}


def numbered(source: str) -> list[str]:
    """Return the subscripts of a module by a number, other than of a shape."""

    def is_number(node: ast.expr | None) -> bool:
        if isinstance(node, ast.UnaryOp):
            return is_number(node.operand)
        return isinstance(node, ast.Constant) and isinstance(node.value, int)

    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and getattr(node.value, "attr", None) != "shape":
            part = node.slice
            bounds = (part.lower, part.upper) if isinstance(part, ast.Slice) else (part,)
            found += [f"{node.lineno}: {ast.unparse(node)}" for x in bounds if is_number(x)]
    return found


@pytest.mark.parametrize("path", sorted((PACKAGE / "ops").glob("*.py")), ids=lambda path: path.name)
def test_arguments_have_names(path: Path):
    """No operator finds an argument by its position: the fields of its problem say what it is."""
    if path.name == "warmup_calls.py":
        pytest.skip("indexes tensors, of which it makes the calls")
    assert not numbered(path.read_text())
    assert numbered("args[4:10], args[-1], x.shape[0], args[count:], rest[7]") == [
        "1: args[4:10]", "1: args[4:10]", "1: args[-1]", "1: rest[7]",
    ]  # fmt: skip

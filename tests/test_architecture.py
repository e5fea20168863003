"""Hold the package to the architecture of CONTRIBUTING.md: the table says which folder may import which."""

import ast
import builtins
import dis
import functools
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import CodeType, UnionType

import pytest
from kit import forks

import gdn
from gdn import notation

PACKAGE = Path(__file__).parent.parent / "src" / "gdn"
BENCHMARKS = Path(__file__).parent.parent / "benchmarks" / "gdn_bench"
SOURCES = [path for folder in (PACKAGE, BENCHMARKS) for path in sorted(folder.rglob("*.py"))]

# folder -> folders it may import; CONTRIBUTING.md has the picture
MAY_IMPORT = {
    "notation": set(),
    "settings": set(),
    "_torch_compat": set(),
    "_failures": set(),
    "problem": {"notation", "_torch_compat"},
    "reference": {"notation"},
    "backends": {"problem", "notation", "settings", "_torch_compat", "_failures"},
    "ops": {"backends", "problem", "reference", "notation", "settings", "_torch_compat"},
    "distributed": {"ops", "problem", "notation", "settings", "_torch_compat"},
    "layers": {"ops", "distributed", "problem", "notation", "_torch_compat"},
    "integrations": {"layers", "distributed", "ops", "settings", "_torch_compat", "_failures"},
    "testing": {"reference"},
    "cli": {"testing", "backends", "integrations", "gdn"},
    "__main__": {"cli"},
    "__init__": {"layers", "ops", "integrations", "distributed"},
}
BACKENDS = {"eager": set(), "triton": {"eager"}, "hopper": {"triton"}}
FORBIDDEN = {
    "triton": {"backends/triton", "backends/hopper"},
    "transformers": {"integrations"},
    "typer": {"cli"},
    "rich": {"cli"},
    "matplotlib": set(),
    "gdn_bench": {"cli"},
}


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file, which is parsed once for all tests."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path: Path) -> set[str]:
    """Return the dotted names that a file imports, anywhere in the file."""
    found: set[str] = set()
    for node in nodes(path):
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


def test_modules_of_the_benchmarks_import_in_no_circle():
    modules = {
        ".".join(path.relative_to(BENCHMARKS.parent).with_suffix("").parts): path
        for path in BENCHMARKS.rglob("*.py")
    }

    finished: set[str] = set()

    def reach(module: str, seen: tuple[str, ...]) -> None:
        assert module not in seen, " -> ".join((*seen, module))
        if module in finished:
            return
        for name in imports(modules[module]):
            # a name is a module, or something in one
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules:
                reach(target, (*seen, module))
        finished.add(module)

    for module in modules:
        reach(module, ())


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


def changes_at_import(text: str) -> list[str]:
    """Statements that change what a module imports from the package: x.append(y), x.y = ..., x[y] = ..."""
    body, found = ast.parse(text).body, []
    names = {
        alias.asname or alias.name.split(".")[0]
        for node in body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).split(".")[0] == "gdn"
    }
    for node in body:
        places = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            places = [node.value.func]
        for place in places:
            root = place
            while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
                root = root.func if isinstance(root, ast.Call) else root.value
            if root is not place and isinstance(root, ast.Name) and root.id in names:
                found.append(ast.unparse(node))
    return found


def test_no_module_fills_what_another_one_holds():
    """The launches that two backends compile together pass from one to the other as values."""
    for path in PACKAGE.rglob("*.py"):
        assert not changes_at_import(path.read_text()), path
    text = "from gdn.backends import triton\nimport gdn\nx = []\nx.append(f)\n"
    text += "triton.x.append(f)\ngdn.x['y'] = f\n"
    assert changes_at_import(text) == ["triton.x.append(f)", "gdn.x['y'] = f"]


def test_only_settings_reads_the_environment():
    for path in SOURCES:
        if path.name != "settings.py":
            assert "os.environ" not in path.read_text() and "getenv" not in path.read_text(), path


def test_a_wrong_arrow_is_seen(tmp_path: Path):
    """The check finds a reference that imports a layer."""
    for name in ("layers", "reference"):
        (tmp_path / name).mkdir()
    (tmp_path / "reference" / "law.py").write_text("from gdn.layers.norm import x\n")
    assert wrong(arrows(tmp_path)) == ["reference/law.py: reference -> layers"]


def name_source(path: Path) -> str:
    """Return a file's path within src or benchmarks, without gdn/."""
    return str(path.relative_to(PACKAGE if PACKAGE in path.parents else BENCHMARKS.parent))


@pytest.mark.parametrize("path", SOURCES, ids=name_source)
def test_source_is_ascii_and_short(path: Path):
    text = path.read_text()
    assert text.isascii()
    assert text.count("\n") <= 400
    long = {}
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef):
            # a docstring is not code: count from the first statement after it
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            lines = (node.end_lineno or 0) - first.lineno
            if lines > (150 if is_kernel(node) else 60):
                long[node.name] = lines
    assert not long


def decorators(function: ast.FunctionDef) -> set[str]:
    return {ast.unparse(node).split(".")[-1] for node in function.decorator_list}


def is_kernel(function: ast.FunctionDef) -> bool:
    """Return True if a function is compiled for a GPU."""
    return not decorators(function).isdisjoint(("kernel", "jit"))


def unknown(code: CodeType, known: set[str]) -> set[str]:
    """Return the global names that some code reads and that its module does not define."""
    found = {x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"} - known
    return found.union(*(unknown(x, known) for x in code.co_consts if isinstance(x, CodeType)))


@pytest.mark.parametrize("path", SOURCES, ids=name_source)
def test_every_name_is_known(path: Path):
    """Every global name is defined. Linters miss some, since the shapes in annotations are strings."""
    if path.name == "__main__.py":
        pytest.skip("runs when imported")
    root = PACKAGE.parent if PACKAGE in path.parents else BENCHMARKS.parent
    parts = path.relative_to(root).with_suffix("").parts
    try:
        module = import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    except ImportError as e:
        pytest.skip(str(e))
    code = compile(path.read_text(), str(path), "exec")
    assert not unknown(code, {*vars(module), *vars(builtins)})
    assert unknown(compile("def f(): return what", "", "exec"), set(vars(builtins))) == {"what"}


def test_import_is_light():
    """`import gdn` imports no Triton, Transformers or command line, and takes at most 0.3 of torch's time."""
    # 0.24 to 0.25 of the CPU time of `import torch` (0.43 s of 1.7 s here): machines differ by two times
    code = (
        "import sys, time; t = [time.process_time()]; import torch; t.append(time.process_time()); "
        "sys.modules['triton'] = None; import gdn; t.append(time.process_time()); "
        "heavy = [m for m in ('transformers', 'typer', 'rich', 'matplotlib', 'fla') if m in sys.modules]; "
        "assert not heavy, heavy; print((t[2] - t[1]) / (t[1] - t[0]))"
    )
    # not a fork of a process that has torch already; other work on the machine disturbs single runs
    shares = [_fresh_share(code)]
    while min(shares) >= 0.3 and len(shares) < 9:
        shares.append(_fresh_share(code))
    assert min(shares) < 0.3, shares


def _fresh_share(code: str) -> float:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_import_makes_no_context():
    """`import gdn` imports neither `gdn.distributed` nor torch's collectives; `gdn.ContextParallel` does.

    torch.distributed.nn is imported, before its defaults can hold a process group.
    """
    code = (
        "import torch, sys; before = set(sys.modules); import gdn; "
        "new = {m for m in set(sys.modules) - before "
        "if 'distributed' in m and not m.startswith('torch.distributed.nn')}; assert not new, new; "
        "gdn.ContextParallel; assert 'gdn.distributed.context' in sys.modules; print('done')"
    )
    assert _python(code).strip() == "done"


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
    done = forks.python("-c", code, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


# At most this many parameters. Tensors of a host function do not count; of a device function every parameter
# does. Not counted: public functions, whose signature is their contract, integrations, which have the
# signature of what they replace, and kernels, whose signature is their ABI.
BUDGET = 8
TENSORS = {
    "Tensor",
    *(name for name, x in vars(notation).items() if hasattr(x, "array_type") or isinstance(x, UnionType)),
}


def num_parameters(function: ast.FunctionDef) -> int:
    """Count a function's parameters without self, cls and ctx, and a host function's without tensors."""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    tensors = set() if "jit" in decorators(function) else TENSORS

    def is_tensor(annotation: ast.expr | None) -> bool:
        return annotation is not None and any(
            isinstance(node, ast.Name) and node.id in tensors for node in ast.walk(annotation)
        )

    return sum(x.arg not in ("self", "cls", "ctx") and not is_tensor(x.annotation) for x in every)


def over_budget(root: Path, is_counted: Callable[[Path, ast.FunctionDef], bool]) -> dict[str, int]:
    """Return how many parameters each counted function above the budget has."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef) and is_counted(path.relative_to(root), node):
                count = num_parameters(node)
                if count > BUDGET:
                    found[f"{path.relative_to(root)}::{node.name}"] = count
    return found


def is_host_function(where: Path, function: ast.FunctionDef) -> bool:
    """Return True for functions outside backends/ that are neither public nor an integration's."""
    if where.parts[0] in ("backends", "integrations"):
        return False
    # the reference of a public function has its signature
    rooms = ("ops", "layers", "reference")
    is_public = where.parts[0] in rooms and function.name in {*gdn.__all__, "__init__"}
    return not is_public


def is_function_of_a_backend(where: Path, function: ast.FunctionDef) -> bool:
    """Return True for host and device functions in backends/ that are no kernels."""
    return where.parts[0] == "backends" and "kernel" not in decorators(function)


def test_parameter_budget():
    """Hold functions to 8 parameters; beyond that a struct or a NamedTuple is missing."""
    assert over_budget(PACKAGE, is_host_function) == {}
    assert over_budget(BENCHMARKS, is_host_function) == {}
    assert over_budget(PACKAGE, is_function_of_a_backend) == {}


def test_a_function_over_the_budget_is_seen(tmp_path: Path):
    """Tensors are free on the host, in any annotation, and not on the device."""
    names = ", ".join(f"x{i}: int" for i in range(9))
    tensors = ", ".join(f"x{i}: Tensor | None" for i in range(9))
    code = (
        f"def few(q: Q, g: PerHead | None, t: tuple[Tensor, ...], {tensors}): ...\ndef many({names}): ...\n"
    )
    (tmp_path / "problem").mkdir()
    (tmp_path / "problem" / "new.py").write_text(code)
    assert over_budget(tmp_path, is_host_function) == {"problem/new.py::many": 9}
    device = f"@gluon.jit\ndef f({tensors}): ...\n@kernel\ndef g({names}): ...\ndef h({tensors}): ...\n"
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "new.py").write_text(device)
    assert over_budget(tmp_path, is_function_of_a_backend) == {"backends/new.py::f": 9}


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

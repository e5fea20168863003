"""Build the tree that the package `kernels` loads: python hub/build.py FOLDER (make kernels).

FOLDER/build.toml and FOLDER/build/torch-universal with its metadata.json are what `kernels` expects of a
repository. The sources are those of src/gdn that the layers need. The tree is loaded under a name that the
loader chooses, beside an installed gdn, with no package but PyTorch and Triton, so three things change:

    imports       relative
    operators     in the namespace of the name under which the tree is loaded
    notation.py   without jaxtyping: every shape is a Tensor
"""

import ast
import hashlib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "gdn"
LAYERS = Path(__file__).parent / "layers.py"
# whole, since backends import by name; of integrations/ only what layers.py imports
PARTS = ("notation.py", "settings.py", "_torch_compat.py", "problem", "reference", "backends", "ops")
INTEGRATIONS = SOURCE / "integrations"
# the package's own name, known when a module runs
NAME = '__name__.partition(".")[0]'
INIT = '''"""Run the gated delta rule of Transformers models on gdn {version}, by the package `kernels`."""

from . import layers
from .ops.conv import causal_conv1d, causal_conv1d_update
from .ops.norm import rms_norm_gated
from .ops.rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from .ops.serving import decode
from .ops.step import decode_step

__version__ = "{version}"
__all__ = [
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "decode",
    "decode_step",
    "fused_recurrent_gated_delta_rule",
    "layers",
    "rms_norm_gated",
]
'''
SHAPES = '''class Float:
    """Stand for a tensor of any shape and dtype."""

    def __class_getitem__(cls, shape):
        return shape[0]


Bool = Int = Float
'''
BUILD = """[general]
name = "gdn"
version = 1
license = "MIT"
backends = ["cuda", "rocm", "xpu"]

[torch-noarch]
"""


def main(folder: Path) -> None:
    """Write the tree."""
    version = re.search(r'__version__ = "([^"]+)"', (SOURCE / "__init__.py").read_text())[1]
    files = {"__init__.py": INIT.format(version=version), "layers.py": rewrite(LAYERS.read_text(), 0)}
    paths = [p for x in PARTS for p in ([SOURCE / x] if x.endswith(".py") else (SOURCE / x).rglob("*.py"))]
    for path in [*paths, INTEGRATIONS / "__init__.py", *integrations(LAYERS)]:
        name = path.relative_to(SOURCE)
        files[str(name)] = rewrite(path.read_text(), len(name.parts) - 1)
    digest = hashlib.sha256("".join(f"{n}\n{text}" for n, text in sorted(files.items())).encode()).hexdigest()
    metadata = {
        "id": f"_gdn_torch_universal_{digest[:12]}", "name": "gdn", "version": 1, "license": "MIT",
        "python-depends": [], "backend": {"type": "cuda"},
    }  # fmt: skip
    files["metadata.json"] = json.dumps(metadata, indent=2) + "\n"
    variant = folder / "build" / "torch-universal"
    for name, text in files.items():
        path = variant / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "build.toml").write_text(BUILD)


def integrations(path: Path) -> set[Path]:
    """Return the files of integrations/ that a file imports, directly or through one another."""
    imports = re.findall(r"^\s*from gdn\.integrations(\.\w+)? import (.*)$", path.read_text(), flags=re.M)
    names = set()
    for module, listed in imports:
        names |= {module[1:]} if module else set(re.findall(r"(\w+)(?: as \w+)?", listed))
    direct = {INTEGRATIONS / f"{name}.py" for name in names} - {path}
    return direct.union(*map(integrations, direct))


def rewrite(text: str, depth: int) -> str:
    """Return a module that lies `depth` folders below the root, independent of the name of the root."""
    dots = "." * (depth + 1)
    text = re.sub(r"^(\s*)from gdn\.([\w.]+) import", rf"\1from {dots}\2 import", text, flags=re.M)
    text = re.sub(r"^(\s*)from gdn import", rf"\1from {dots} import", text, flags=re.M)
    text = re.sub(r"^from jaxtyping import .*\n", "", text, flags=re.M)
    if depth == 0 and "Float[Tensor" in text:
        text = text.replace("from torch import Tensor\n", f"from torch import Tensor\n\n\n{SHAPES}", 1)
    text = re.sub(r'f?"gdn\.([\w.{}]*)"', rf"({NAME} + f'.\1')", text)
    text = re.sub(r'f"gdn::(\{\w+\})"', rf"({NAME} + f'::\1')", text)
    text = re.sub(r'"gdn::(\w+)"', rf'({NAME} + "::\1")', text)
    text = re.sub(r"torch\.ops\.gdn\b", f"getattr(torch.ops, {NAME})", text)
    text = text.replace('Library("gdn", ', f"Library({NAME}, ")
    check(text)
    return text


def check(text: str) -> None:
    """Raise ValueError for code that still names the package."""
    for node in ast.walk(ast.parse(text)):
        is_import = isinstance(node, ast.Import) and any(x.name.split(".")[0] == "gdn" for x in node.names)
        is_from = (
            isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("gdn")
        )
        if is_import or is_from or (isinstance(node, ast.Name) and node.id == "gdn"):
            raise ValueError(f"line {node.lineno}: expected no name of the package, got {ast.unparse(node)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

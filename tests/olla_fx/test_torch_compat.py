import ast
import linecache
import re
from pathlib import Path

import pytest
from torch.utils import cpp_extension

import olla_fx
from olla_fx import torch_compat

PACKAGE = Path(olla_fx.__file__).parent


# Operators of ATen whose names begin with an underscore are as public as others.
OPERATOR = re.compile(r"(aten|torch\.ops\.\w+)\.\w+")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.Module) -> set[str]:
    """Return the private attributes that a module's classes define, or assign on ``self`` or ``cls``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_on_self(node):
            names.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    names.add(part.name)
                elif isinstance(part, ast.AnnAssign):
                    names.add(ast.unparse(part.target))
    return names


def is_on_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_names(source: str) -> set[str]:
    """Return what a module's code uses of others' private names, and of torch's experimental parts."""
    tree = ast.parse(source)
    own, names = own_names(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            of_other = is_private(node.attr) and node.attr not in own and not is_on_self(node)
            if (of_other and not OPERATOR.fullmatch(text)) or is_experimental(text):
                names.add(text)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("getattr", "setattr", "attrgetter")
        ):
            words = [part.value for part in node.args if isinstance(part, ast.Constant)]
            names |= {word for word in words if isinstance(word, str) and is_private(word)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            start = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for alias in node.names:
                path = ".".join([*start, alias.name])
                if path.startswith("torch.") and ("._" in path or is_experimental(path)):
                    names.add(path)
    return names


def is_experimental(path: str) -> bool:
    return path.startswith("torch.") and "experimental" in path


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "from torch import _C",
        "from torch.utils import _pytree as pytree",
        "from torch.fx.experimental import proxy_tensor",
        "import torch\nx = torch._C._len_torch_dispatch_stack()",
        "import torch\nx = torch.fx.experimental.proxy_tensor",
        "version = tensor._version",
        "name = node.target._schema.name",
        "names = aten.add.Tensor._schema.name, aten.add",
        "tables = [f(module)._parameters for module in modules]",
        "schema = getattr(target, '_schema', None)",
        "version_of = operator.attrgetter('_version')",
        "self._other.tensor._version = 1",
    ],
)
def test_private_names_are_seen(source):
    assert private_names(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.nn.functional.relu\ny = torch.utils.data",
        "x = aten._grouped_mm.default, torch.ops.aten._foreach_add.List",
        "class Phase:\n  def f(self, other):\n    self._nodes = other._nodes",
        "class Module:\n  def _apply(self, f):\n    self.model._apply(f)",
        "x = type(f).__name__",
    ],
)
def test_public_and_own_names_are_no_private_ones(source):
    assert not private_names(source)


def test_private_interfaces_of_torch_are_used_behind_one_door():
    elsewhere = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        if "torch_compat" not in path.parts
        for name in private_names(path.read_text(encoding="utf-8"))
    }
    assert not elsewhere


def test_the_door_leads_to_every_room():
    assert set(torch_compat.__all__) <= set(vars(torch_compat))


def test_extensions_lie_where_torch_builds_them():
    assert torch_compat.extensions_folder() == Path(cpp_extension.get_default_build_root())


def test_a_fake_mode_leaves_no_files_in_memory():
    linecache.clearcache()
    torch_compat.new_fake_mode()
    assert not linecache.cache

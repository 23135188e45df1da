import ast
from pathlib import Path

import pytest

import olla_fx
from olla_fx import torch_compat

PACKAGE = Path(olla_fx.__file__).parent


def private_names(source: str) -> set[str]:
    """The names in torch that begin with an underscore, and its experimental parts, in a module's code."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{each.name}" for each in node.names}
    return {name for name in names if name.startswith("torch.") and ("._" in name or "experimental" in name)}


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "from torch import _C",
        "from torch.utils import _pytree as pytree",
        "from torch.fx.experimental import proxy_tensor",
        "import torch\nx = torch._C._len_torch_dispatch_stack()",
    ],
)
def test_private_names_are_seen(source):
    assert private_names(source)


def test_public_names_are_no_private_ones():
    assert not private_names("import torch\nx = torch.nn.functional.relu\ny = torch.utils.data")


def test_private_interfaces_of_torch_are_used_behind_one_door():
    elsewhere = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        if "torch_compat" not in path.parts
        for name in private_names(path.read_text(encoding="utf-8"))
        if not name.startswith("torch.__")
    }
    assert not elsewhere


def test_the_door_leads_to_every_room():
    assert set(torch_compat.__all__) <= set(vars(torch_compat))

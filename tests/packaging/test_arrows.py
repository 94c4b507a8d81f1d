"""Which package may import which, read from the sources and seen in fresh interpreters."""

import ast
import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torchless

OURS = {
    "deepinfer": "deepinfer-core",
    "deepinfer_cli": "deepinfer-cli",
    "deepinfer_kernels_ascend": "deepinfer-kernels-ascend",
    "deepinfer_kernels_nvidia": "deepinfer-kernels-nvidia",
    "deepinfer_moe": "deepinfer-moe",
}
MAY_IMPORT = {
    "deepinfer": set(),
    "deepinfer_cli": {"deepinfer"},
    "deepinfer_kernels_ascend": {"deepinfer"},
    "deepinfer_kernels_nvidia": {"deepinfer"},
    "deepinfer_moe": set(),
}


def imported_names(folder):
    """Top-level names of every import in a source tree, at any depth of the code."""
    names = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"), str(file))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.split(".")[0])
    return names


def modules_after(statement):
    """Top-level modules that a fresh interpreter holds after one statement."""
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in json.loads(run.stdout)}


@pytest.mark.parametrize("package", OURS)
def test_imports_follow_the_arrows(root, package):
    names = imported_names(root / "packages" / OURS[package] / "src")
    assert names & set(OURS) - {package} <= MAY_IMPORT[package]


def test_moe_needs_numpy_and_torch_alone(root):
    names = imported_names(root / "packages" / "deepinfer-moe" / "src")
    assert names - set(sys.stdlib_module_names) <= {"deepinfer_moe", "numpy", "torch"}


@pytest.mark.parametrize("package", OURS)
def test_importing_a_package_imports_no_sibling_it_does_not_need(package):
    loaded = modules_after(f"import {package}")
    assert loaded & set(OURS) - {package} <= MAY_IMPORT[package]


def test_importing_core_imports_no_optional_package():
    optional = {"cyclopts", "rich", "triton", "torch_npu", "xgrammar", "deepseek_recipe"}
    optional |= {"matplotlib", "plotext", "transformers", "pydantic", "ray"}
    assert not modules_after("import deepinfer") & optional


def test_listing_backends_imports_none_of_them():
    loaded = modules_after(
        "from deepinfer.kernels.registry import installed_backends; installed_backends()"
    )
    assert not loaded & {"deepinfer_kernels_nvidia", "deepinfer_kernels_ascend", "triton"}

"""One version, one licence, exact pins on siblings, and extras that never mix platforms."""

import importlib
import importlib.util
import re
import shutil

import pytest

pytestmark = pytest.mark.torchless

PACKAGES = [
    "deepinfer-cli",
    "deepinfer-core",
    "deepinfer-kernels-ascend",
    "deepinfer-kernels-nvidia",
    "deepinfer-moe",
]


def name_of(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9_.-]+", requirement).group().lower()


@pytest.fixture(scope="module")
def sync_packages(root):
    """The script that keeps the distributions in step, as a module."""
    spec = importlib.util.spec_from_file_location("sync_packages", root / "tools/sync_packages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(root, tmp_path):
    """A copy of what the script reads and writes."""
    for name in ("VERSION.txt", "LICENSE", "pyproject.toml"):
        shutil.copy(root / name, tmp_path / name)
    for project in root.glob("packages/*/pyproject.toml"):
        copy = tmp_path / "packages" / project.parent.name
        copy.mkdir(parents=True)
        shutil.copy(project, copy)
        shutil.copy(project.parent / "LICENSE", copy)
    return tmp_path


def test_there_are_the_meta_package_and_five_distributions(distributions):
    assert list(distributions) == ["deepinfer", *PACKAGES]


def test_pins_and_licences_are_in_step_with_the_root(root, sync_packages):
    assert sync_packages.stale_files(root) == {}


def test_every_version_comes_from_the_root_file(root, distributions):
    for distribution in distributions.values():
        assert distribution.project["dynamic"] == ["version"]
        path = distribution.folder / distribution.table["tool"]["hatch"]["version"]["path"]
        assert path.resolve() == root / "VERSION.txt"


def test_siblings_are_required_at_exactly_this_version(root, distributions):
    version = (root / "VERSION.txt").read_text().strip()
    for distribution in distributions.values():
        extras = distribution.project.get("optional-dependencies", {}).values()
        for requirement in [*distribution.requirements, *(r for extra in extras for r in extra)]:
            if name_of(requirement).startswith("deepinfer"):
                assert requirement == f"{name_of(requirement)}=={version}"


def test_a_new_version_reaches_every_pin_and_nothing_else(checkout, sync_packages, capsys):
    before = {path: path.read_text() for path in checkout.rglob("pyproject.toml")}
    (checkout / "VERSION.txt").write_text("0.2.0\n")
    (checkout / "packages/deepinfer-moe/LICENSE").unlink()
    argv = ["--root", str(checkout)]
    assert sync_packages.main([*argv, "--check"]) == 1
    assert sync_packages.main(argv) == 0
    assert sync_packages.main([*argv, "--check"]) == 0
    assert "wrote: packages/deepinfer-moe/LICENSE" in capsys.readouterr().out
    for path, text in before.items():
        assert path.read_text() == text.replace("==0.1.0", "==0.2.0")


def test_all_distributions_name_the_same_python_and_licence(distributions):
    for distribution in distributions.values():
        project = distribution.project
        assert project["requires-python"] == ">=3.11"
        assert project["license"] == "Apache-2.0"
        assert project["license-files"] == ["LICENSE"]
        assert (distribution.folder / "README.md").is_file()


@pytest.mark.parametrize("name", PACKAGES)
def test_every_package_says_that_it_is_typed(distributions, name):
    folder = distributions[name].folder
    (package,) = distributions[name].table["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert (folder / package / "py.typed").is_file()


def closure(distributions, extra):
    """Names of everything that `deepinfer[extra]` brings in, as far as our own metadata says."""
    meta = distributions["deepinfer"]
    todo = [*meta.requirements, *meta.project["optional-dependencies"].get(extra, [])]
    seen = set()
    while todo:
        name = name_of(todo.pop())
        if name not in seen:
            seen.add(name)
            todo += distributions[name].requirements if name in distributions else []
    return seen


@pytest.mark.parametrize(
    ("extra", "present", "absent"),
    [
        ("none", {"deepinfer-core", "deepinfer-cli"}, {"nvidia", "ascend", "triton", "npu", "moe"}),
        ("nvidia", {"deepinfer-kernels-nvidia", "deepinfer-moe"}, {"ascend", "npu"}),
        ("ascend", {"deepinfer-kernels-ascend", "deepinfer-moe"}, {"nvidia", "cuda"}),
        ("moe", {"deepinfer-moe"}, {"nvidia", "ascend"}),
        ("chat", {"deepseek-recipe"}, {"nvidia", "ascend"}),
        ("structured", {"xgrammar"}, {"nvidia", "ascend"}),
        ("plot", {"matplotlib", "plotext"}, {"nvidia", "ascend"}),
        ("all", {"deepinfer-moe", "deepseek-recipe", "xgrammar", "plotext"}, {"nvidia", "ascend"}),
    ],
)
def test_an_extra_brings_its_packages_and_nothing_of_another_platform(
    distributions, extra, present, absent
):
    names = closure(distributions, extra)
    assert present <= names
    assert [name for name in names if any(word in name for word in absent)] == []


def test_the_table_of_extras_is_complete(distributions):
    extras = set(distributions["deepinfer"].project["optional-dependencies"])
    assert extras == {"nvidia", "ascend", "moe", "chat", "metrics", "structured", "plot", "all"}


def test_entry_points_lead_to_what_they_name(distributions):
    found = {}
    for distribution in distributions.values():
        groups = distribution.project.get("entry-points", {})
        assert set(groups) <= {"deepinfer.kernels", "deepinfer.commands"}
        found |= groups.get("deepinfer.kernels", {})
    assert set(found) == {"cpu", "reference", "nvidia", "ascend"}
    for name, target in found.items():
        module, attribute = target.split(":")
        backend = getattr(importlib.import_module(module), attribute)()
        assert backend.name == name


def test_the_command_leads_to_its_function(distributions):
    scripts = distributions["deepinfer-cli"].project["scripts"]
    assert scripts == {"deepinfer": "deepinfer_cli.main:main"}
    assert callable(importlib.import_module("deepinfer_cli.main").main)

"""What the wheels hold, built from the checkout as it is."""

import subprocess
import sys
import zipfile
from email import message_from_bytes

import pytest

pytestmark = pytest.mark.torchless


@pytest.fixture(scope="module")
def wheels(distributions, tmp_path_factory):
    """Every distribution built: name -> (file names in the wheel, its metadata)."""
    built = {}
    for name, distribution in distributions.items():
        out = tmp_path_factory.mktemp(name)
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
        subprocess.run(command, cwd=distribution.folder, check=True, capture_output=True)
        (file,) = out.glob("*.whl")
        assert file.name.endswith("-py3-none-any.whl")
        with zipfile.ZipFile(file) as archive:
            files = archive.namelist()
            (metadata,) = (f for f in files if f.endswith(".dist-info/METADATA"))
            built[name] = (files, message_from_bytes(archive.read(metadata)))
    return built


def test_wheels_carry_licence_type_marker_and_their_package_alone(wheels, distributions):
    for name, (files, _) in wheels.items():
        assert any(f.endswith(".dist-info/licenses/LICENSE") for f in files)
        code = {f.split("/")[0] for f in files if ".dist-info/" not in f}
        if name == "deepinfer":
            assert code == set()
            continue
        package = "deepinfer" if name == "deepinfer-core" else name.replace("-", "_")
        assert code == {package}
        assert f"{package}/py.typed" in files
        source = distributions[name].folder / "src"
        sources = {str(f.relative_to(source)) for f in source.rglob("*.py")}
        assert sources == {f for f in files if f.endswith(".py")}


def test_wheels_carry_one_version_and_their_requirements(wheels, distributions, root):
    version = (root / "VERSION.txt").read_text().strip()
    for name, (_, metadata) in wheels.items():
        assert metadata["Version"] == version
        assert metadata["License-Expression"] == "Apache-2.0"
        plain = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
        wanted = [r.replace("_", "-") for r in distributions[name].requirements]
        assert sorted(plain) == sorted(wanted)


def test_meta_wheel_offers_the_extras(wheels, distributions):
    _, metadata = wheels["deepinfer"]
    offered = set(metadata.get_all("Provides-Extra"))
    assert offered == set(distributions["deepinfer"].project["optional-dependencies"])

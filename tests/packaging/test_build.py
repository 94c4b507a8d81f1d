"""build.sh: what each platform needs and gets, on made-up machines; and one real installation."""

import re
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torchless

SETS = {
    "cpu": ["core", "cli"],
    "nvidia": ["core", "cli", "moe", "kernels-nvidia"],
    "ascend": ["core", "cli", "moe", "kernels-ascend"],
}
GCC = "cc (Debian 12.2.0-14+deb12u1) 12.2.0"
PYTHON = """case "$*" in
*python_version*) echo {version} ;;
*torch_npu*) exit {npu} ;;
*torch.version*) echo {torch} ;;
*torch.__version__*) echo {torch} ;;
*"pip --version"*) exit {pip} ;;
*) echo "ran: $*" ;;
esac"""


class Machine:
    """A folder of programs that pretend a machine."""

    def __init__(self, folder, root):
        self.folder = folder
        self.root = root
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("bash", "dirname", "sort", "head", "tail", "grep", "cut", "ls", "cat", "sed"):
            (self.bin / name).symlink_to(shutil.which(name))
        self.says("uname", "case $1 in -s) echo Linux ;; *) echo x86_64 ;; esac")
        self.says("cc", f"echo '{GCC}'")
        self.python()
        (folder / "dev").mkdir()
        self.environ = {"PATH": str(self.bin), "DEV": str(folder / "dev")}

    def says(self, name, script):
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!{self.bin}/bash\n{script}\n")
        path.chmod(0o755)

    def python(self, *, version="3.11.7", npu=0, torch="", pip=0):
        self.says("python3", PYTHON.format(version=version, npu=npu, torch=torch, pip=pip))

    def nvidia(self, *, cuda="13.0", devices=("9.0, NVIDIA H200",)):
        rows = "\n".join(devices)
        self.says(
            "nvidia-smi",
            f"case $* in *query-gpu*) cat <<'END'\n{rows}\nEND\n;;\n"
            f"*) echo '| NVIDIA-SMI 580.1  Driver Version: 580.1  CUDA Version: {cuda} |' ;; esac",
        )

    def ascend(self, *, cann="9.2.0", devices=1, file="version.cfg"):
        home = self.folder / "cann"
        home.mkdir()
        (home / file).parent.mkdir(exist_ok=True)
        if file == "version.cfg":
            line = f"# version: 1.0\nruntime_running_version=[7.6.0.1.220:CANN-{cann}]\n"
        else:
            line = f"package_name=Ascend-cann-toolkit\nversion={cann}\ninnerversion=V100R001\n"
        (home / file).write_text(line)
        for at in range(devices):
            (self.folder / "dev" / f"davinci{at}").touch()
        (self.folder / "dev" / "davinci_manager").touch()
        self.environ["ASCEND_HOME_PATH"] = str(home)

    def build(self, accelerator, *args):
        environ = dict(self.environ)
        if accelerator is not None:
            environ["DEEPINFER_ACCELERATOR"] = accelerator
        return subprocess.run(
            [str(self.bin / "bash"), str(self.root / "build.sh"), *args],
            env=environ, cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path, root):
    return Machine(tmp_path, root)


def line_of(done, what):
    """The report of one need, as (status, rest)."""
    (found,) = re.findall(rf"^(ok|warning|missing) +{what} +(.*)$", done.stdout, re.M)
    return found


@pytest.mark.parametrize("accelerator", SETS)
def test_a_dry_run_prints_exactly_the_platforms_set_and_installs_nothing(
    machine, root, accelerator
):
    machine.nvidia()
    machine.ascend()
    done = machine.build(accelerator, "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"packages/deepinfer-([\w-]+)", done.stdout) == SETS[accelerator]
    assert f"python3 -m pip install {root}/packages/deepinfer-core" in done.stdout
    assert "dry run, nothing was installed" in done.stdout
    assert "ran:" not in done.stdout


@pytest.mark.parametrize("accelerator", SETS)
def test_an_installation_runs_the_command_of_the_dry_run(machine, accelerator):
    machine.nvidia()
    machine.ascend()
    done = machine.build(accelerator, "--", "--quiet", "--no-deps")
    assert done.returncode == 0, done.stdout + done.stderr
    (ran,) = re.findall(r"^ran: (.*)$", done.stdout, re.M)
    assert ran.startswith("-m pip install --quiet --no-deps /")
    assert re.findall(r"packages/deepinfer-([\w-]+)", ran) == SETS[accelerator]
    assert f"installed for '{accelerator}'" in done.stdout


def test_the_sets_are_those_of_the_extras(distributions):
    extras = distributions["deepinfer"].project["optional-dependencies"]
    base = [r.partition("==")[0] for r in distributions["deepinfer"].requirements]
    for accelerator, names in SETS.items():
        wanted = base + [r.partition("==")[0] for r in extras.get(accelerator, [])]
        assert sorted(f"deepinfer-{name}" for name in names) == sorted(wanted)


def test_without_an_accelerator_it_is_the_cpu_and_says_so(machine):
    done = machine.build(None, "--dry-run")
    assert done.returncode == 0
    assert "DEEPINFER_ACCELERATOR is not set, so this is for the cpu" in done.stdout
    assert re.findall(r"packages/deepinfer-([\w-]+)", done.stdout) == SETS["cpu"]


@pytest.mark.parametrize(
    ("name", "near"), [("nvidai", "nvidia"), ("cuda", "nvidia"), ("npu", "ascend"), ("x86", "cpu")]
)
def test_a_misspelt_accelerator_is_wrong_usage_with_a_suggestion(machine, name, near):
    done = machine.build(name)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"found '{name}', allowed: cpu nvidia ascend; did you mean {near}?" in done.stderr


@pytest.mark.parametrize("args", [["--dryrun"], ["nvidia"], ["--dry-run", "-q"]])
def test_an_unknown_argument_is_wrong_usage(machine, args):
    done = machine.build("cpu", *args)
    assert done.returncode == 2
    assert f"unknown argument '{args[-1]}'" in done.stderr


def test_help_tells_the_platforms(machine):
    done = machine.build(None, "--help")
    assert done.returncode == 0
    for word in (*SETS, "--dry-run", "PYTHON=", "CUDA 13", "CANN 9.2"):
        assert word in done.stdout


def test_every_need_says_what_is_found_and_what_is_needed(machine):
    machine.nvidia()
    done = machine.build("nvidia", "--dry-run")
    for what, found in (
        ("system", "Linux x86_64"),
        ("python", "3.11.7"),
        ("compiler", "gcc 12.2.0"),
        ("cuda", "driver for CUDA 13.0"),
        ("device", "1 x NVIDIA H200 (compute capability 9.0)"),
    ):
        status, rest = line_of(done, what)
        assert status == "ok"
        assert f"found: {found}" in rest
        assert "needed: " in rest


@pytest.mark.parametrize(
    ("accelerator", "change", "what", "said"),
    [
        ("cpu", lambda m: m.says("uname", "echo Darwin"), "system", "needed: Linux"),
        ("cpu", lambda m: m.python(version="3.10.4"), "python", "found: 3.10.4; needed: >= 3.11"),
        ("cpu", lambda m: m.python(version="''"), "python", "found: no python3"),
        ("cpu", lambda m: m.python(pip=1), "python", "without pip"),
        ("nvidia", lambda m: (m.bin / "cc").unlink(), "compiler", "found: none (looked for cc"),
        ("nvidia", lambda m: m.says("cc", "echo 'gcc 8.3.0'"), "compiler", "gcc 8.3.0"),
        ("nvidia", lambda m: m.says("cc", "echo 'clang version 9.0.1'"), "compiler", "too old"),
        ("nvidia", lambda m: (m.bin / "nvidia-smi").unlink(), "driver", "found: no nvidia-smi"),
        ("nvidia", lambda m: m.nvidia(cuda="12.9"), "cuda", "CUDA 12.9; needed: CUDA >= 13.0"),
        ("nvidia", lambda m: m.says("nvidia-smi", "exit 9"), "cuda", "a driver that does not ans"),
        ("nvidia", lambda m: m.nvidia(devices=["8.0, A100"]), "device", "capability 8.0"),
        ("nvidia", lambda m: m.nvidia(devices=["9.0, a", "8.9, b"]), "device", "capability 8.9"),
        ("nvidia", lambda m: m.nvidia(devices=[]), "device", "found: none"),
        ("nvidia", lambda m: m.python(torch="none"), "torch", "found: a build without CUDA"),
        ("ascend", lambda m: None, "cann", "found: none in "),
        ("ascend", lambda m: m.ascend(cann="8.3.1"), "cann", "found: CANN 8.3.1; needed: CANN >="),
        ("ascend", lambda m: m.ascend(devices=0), "device", "found: none (no "),
        ("ascend", lambda m: m.python(npu=1), "torch_npu", "found: none"),
    ],
)
def test_a_need_that_is_not_met_stops_before_anything_is_installed(
    machine, accelerator, change, what, said
):
    if accelerator == "nvidia":
        machine.nvidia()
    machine.environ["ASCEND_HOME_PATH"] = str(machine.folder / "absent")
    change(machine)
    done = machine.build(accelerator)
    assert done.returncode == 1
    status, rest = line_of(done, what)
    assert status == "missing"
    assert said in rest
    assert "ran:" not in done.stdout
    assert f"of the needs of '{accelerator}' are not met; nothing was installed" in done.stderr


@pytest.mark.parametrize(
    "change",
    [lambda m: (m.bin / "cc").unlink(), lambda m: m.says("cc", "echo 'gcc (GCC) 4.8.5'")],
    ids=["none", "too old"],
)
def test_the_cpu_does_without_a_compiler_and_says_what_that_costs(machine, change):
    change(machine)
    done = machine.build("cpu")
    assert done.returncode == 0
    status, rest = line_of(done, "compiler")
    assert status == "warning"
    assert "install gcc >= 9 or clang >= 10" in rest
    assert "several times slower" in rest


@pytest.mark.parametrize(
    ("file", "version", "found"),
    [
        ("version.cfg", "9.2", "CANN 9.2 ("),
        ("ascend_toolkit_install.info", "9.2.0", "CANN 9.2.0 ("),
        ("aarch64-linux/ascend_toolkit_install.info", "9.3.RC1", "CANN 9.3 ("),
        ("x86_64-linux/ascend_toolkit_install.info", "10.0.1", "CANN 10.0.1 ("),
    ],
)
def test_the_version_of_cann_is_read_from_its_own_record(machine, file, version, found):
    machine.ascend(cann=version, file=file)
    status, rest = line_of(machine.build("ascend", "--dry-run"), "cann")
    assert status == "ok"
    assert rest.startswith(f"found: {found}")


def test_a_newer_torch_for_another_cuda_is_a_warning(machine):
    machine.nvidia()
    machine.python(torch="12.8")
    done = machine.build("nvidia", "--dry-run")
    assert done.returncode == 0
    assert line_of(done, "torch")[0] == "warning"


def test_a_compiler_named_in_cc_is_the_one_that_is_looked_at(machine):
    machine.says("my-cc", "echo 'clang version 17.0.1'")
    machine.environ["CC"] = "my-cc"
    assert "found: clang 17.0.1" in line_of(machine.build("cpu", "--dry-run"), "compiler")[1]


@pytest.mark.slow
def test_a_real_installation_brings_exactly_the_set_of_the_cpu(root, tmp_path):
    """Without requirements and without a network, into a folder of its own."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(tmp_path / "site")]
    done = subprocess.run(
        ["bash", str(root / "build.sh"), "--", *options],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "DEEPINFER_ACCELERATOR": "cpu",
             "HOME": str(tmp_path), "PIP_NO_INDEX": "1"},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path.name.partition("-")[0] for path in (tmp_path / "site").glob("*.dist-info")}
    assert found == {"deepinfer_core", "deepinfer_cli"}


def test_the_cpu_is_told_that_pip_may_take_a_large_build_of_torch(machine):
    assert "pip may take a CUDA build of several GB" in " ".join(
        line_of(machine.build("cpu"), "torch")
    )
    machine.python(torch="2.13.0+cpu")
    status, rest = line_of(machine.build("cpu"), "torch")
    assert (status, "2.13.0+cpu" in rest) == ("ok", True)

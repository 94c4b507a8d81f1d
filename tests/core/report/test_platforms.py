"""The accelerator that is asked for: there, or an error that says why and what to do."""

import pytest

from deepinfer.errors import BackendError, ConfigError
from deepinfer.kernels import registry
from deepinfer.report import platforms
from deepinfer.report.platforms import Platform, choose_platform, require_devices

pytestmark = pytest.mark.torchless


@pytest.fixture
def install(monkeypatch):
    """Pretends installed platforms: name -> the reason why it is not usable, empty if it is."""

    def pretend(**reasons):
        def load(name):
            probe = registry.Probe(not reasons[name], reasons[name])
            device_type = {"nvidia": "cuda", "ascend": "npu"}[name]
            return registry.Backend(name, 1, device_type, lambda: probe, None)

        monkeypatch.setattr(platforms, "installed_backends", lambda: dict.fromkeys(reasons))
        monkeypatch.setattr(platforms, "load_backend", load)
        monkeypatch.setattr(platforms, "count_devices", lambda device_type: 4)

    return pretend


@pytest.mark.parametrize("name", [None, "cpu"])
def test_unset_is_the_cpu_and_asks_no_package(install, name):
    install()
    assert choose_platform(name) == Platform(name="cpu", device_type="cpu", num_devices=1)


def test_a_usable_accelerator_is_taken(install):
    install(nvidia="")
    assert choose_platform("nvidia") == Platform(name="nvidia", device_type="cuda", num_devices=4)


@pytest.mark.parametrize("name", ["nvidia", "ascend"])
def test_a_platform_that_is_not_installed_is_an_error_with_the_command(install, name):
    install()
    with pytest.raises(BackendError) as caught:
        choose_platform(name)
    assert "not installed" in str(caught.value)
    assert f"`DEEPINFER_ACCELERATOR={name} ./build.sh`" in str(caught.value)


def test_a_platform_that_is_not_usable_is_an_error_with_the_reason_and_never_the_cpu(install):
    install(nvidia="no NVIDIA driver on this machine")
    with pytest.raises(BackendError) as caught:
        choose_platform("nvidia")
    assert "cannot run here: no NVIDIA driver on this machine; unset it" in str(caught.value)


@pytest.mark.parametrize(("name", "near"), [("nvidai", "nvidia"), ("acsend", "ascend")])
def test_a_misspelt_platform_is_an_error_that_suggests_the_right_one(name, near):
    with pytest.raises(ConfigError, match=f"did you mean {near}"):
        choose_platform(name)


def test_fewer_devices_than_ep_asks_for_is_an_error_with_both_numbers():
    nvidia = Platform(name="nvidia", device_type="cuda", num_devices=4)
    require_devices(1, choose_platform(None))
    require_devices(4, nvidia)
    with pytest.raises(BackendError) as caught:
        require_devices(8, nvidia)
    assert str(caught.value).startswith("ep=8 needs 8 devices, the platform 'nvidia' has 4 devices")
    with pytest.raises(BackendError, match="has 1 device here; lower it to 1, or name an acceler"):
        require_devices(8, choose_platform(None))
    with pytest.raises(ConfigError, match="ep=0"):
        require_devices(0, nvidia)


def test_devices_are_counted_by_torch():
    pytest.importorskip("torch", reason="torch is not installed")
    assert platforms.count_devices("cpu") == 1
    assert platforms.count_devices("cuda") >= 0

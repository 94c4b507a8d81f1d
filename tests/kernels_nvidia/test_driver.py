"""Reading device facts from the CUDA driver, with a pretended driver library."""

import ctypes

import pytest

from deepinfer_kernels_nvidia import driver

pytestmark = pytest.mark.torchless


class PretendedDriver:
    """Answers the four calls from a list of compute capabilities."""

    def __init__(self, devices, *, init=0, count=0):
        self.devices, self.init, self.count = devices, init, count

    def cuInit(self, flags):
        return self.init

    def cuDeviceGetCount(self, out):
        out._obj.value = len(self.devices)
        return self.count

    def cuDeviceGet(self, out, index):
        out._obj.value = index
        return 0

    def cuDeviceGetAttribute(self, out, attribute, device):
        out._obj.value = self.devices[device.value][{75: 0, 76: 1}[attribute]]
        return 0


@pytest.fixture
def install(monkeypatch):
    return lambda library: monkeypatch.setattr(ctypes, "CDLL", lambda name: library)


def test_capabilities_are_read_device_by_device(install):
    install(PretendedDriver([(9, 0), (10, 3)]))
    assert driver.compute_capabilities() == [(9, 0), (10, 3)]


def test_driver_without_device_gives_an_empty_list(install):
    install(PretendedDriver([], init=100))
    assert driver.compute_capabilities() == []


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (PretendedDriver([], init=999), "cuInit with error 999"),
        (PretendedDriver([(9, 0)], count=3), "cuDeviceGetCount with error 3"),
    ],
)
def test_driver_errors_name_the_call_and_the_code(install, library, said):
    install(library)
    with pytest.raises(driver.DriverError, match=said):
        driver.compute_capabilities()


def test_missing_driver_is_said_in_one_sentence(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(driver.DriverError, match="no NVIDIA driver on this machine"):
        driver.compute_capabilities()

"""Finding kernels: only the chosen platform is imported, and nothing falls back silently."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

from deepinfer.errors import BackendError
from deepinfer.kernels import registry
from deepinfer.kernels.registry import API_VERSION, Backend, Probe

made: list[str] = []


def make(name: str, **changes: object) -> Callable[[], Backend]:
    def factory() -> Backend:
        made.append(name)
        parts = {"api_version": API_VERSION, "device_type": "gpu", "probe": lambda: Probe(True, "")}
        return Backend(name=name, create=None, **(parts | changes))  # type: ignore[arg-type]

    return factory


one, two = make("one"), make("two")
broken, old = make("broken", probe=lambda: Probe(False, "no card")), make("old", api_version=0)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that these platforms of this module are installed."""

    def pretend(*names: str) -> None:
        made.clear()
        entries = [EntryPoint(n, f"{__name__}:{n}", registry.ENTRY_POINT_GROUP) for n in names]
        monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.name])
        monkeypatch.setattr(registry, "entry_points", lambda group: entries)

    return pretend


def test_listing_imports_nothing(installed: Callable[..., None]) -> None:
    installed("two", "one")
    assert list(registry.installed_backends()) == ["one", "two"]
    assert made == []


def test_only_the_named_one_is_imported(installed: Callable[..., None]) -> None:
    installed("one", "two")
    assert registry.load_backend("two").name == "two"
    assert made == ["two"]


@pytest.mark.parametrize(
    ("name", "words"), [("onne", "did you mean 'one'"), ("cuda", "have: one, two")]
)
def test_an_unknown_name_says_what_there_is(
    installed: Callable[..., None], name: str, words: str
) -> None:
    installed("one", "two")
    with pytest.raises(BackendError, match=words):
        registry.load_backend(name)


def test_another_interface_version_is_refused(installed: Callable[..., None]) -> None:
    installed("old")
    with pytest.raises(BackendError, match="speaks kernel interface 0"):
        registry.load_backend("old")


def test_two_packages_with_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint("x", f"{place}:f", registry.ENTRY_POINT_GROUP) for place in ("here", "there")
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    with pytest.raises(BackendError, match="here:f and there:f"):
        registry.installed_backends()


def test_the_devices_own_kernels_are_taken(installed: Callable[..., None]) -> None:
    installed("broken", "one")
    assert registry.backend_for_device("gpu").name == "one"


def test_without_any_the_reference_is_taken(installed: Callable[..., None]) -> None:
    installed("broken")
    assert registry.backend_for_device("gpu").name == "reference"


def test_a_broken_package_does_not_stop_the_others(installed: Callable[..., None]) -> None:
    installed("old", "one")
    assert registry.backend_for_device("gpu").name == "one"


def test_two_usable_platforms_must_be_chosen_between(installed: Callable[..., None]) -> None:
    installed("one", "two")
    with pytest.raises(BackendError, match="one, two"):
        registry.backend_for_device("gpu")

"""Where a reference computes: on the devices that were leased, at full precision, or not at all."""

from types import SimpleNamespace

import pytest
import torch

from assay.errors import DeviceError
from assay.references.placement import device_map, matmul, memory_told, require_on_devices

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(("gpus", "expected"), [(0, None), (1, "cuda:0"), (2, "auto")])
def test_weights_go_to_the_leased_devices(monkeypatch, gpus, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert device_map(gpus) == expected


@pytest.mark.parametrize(("available", "count", "seen"), [(False, 1, 0), (True, 0, 0), (True, 8, 8)])
def test_a_torch_that_does_not_see_just_the_leased_devices_is_refused(monkeypatch, available, count, seen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(DeviceError, match=f"1 devices are leased.*sees {seen}; nothing falls back to the CPU"):
        device_map(1)


def test_weights_that_found_no_room_on_the_devices_are_refused():
    model = torch.nn.Linear(2, 2)
    require_on_devices(model, 0)
    with pytest.raises(DeviceError, match=r"no room on 2 devices: weights lie on \['cpu'\].*reference_gpus"):
        require_on_devices(model, 2)
    with pytest.raises(DeviceError, match="meta"):
        require_on_devices(torch.nn.Linear(2, 2, device="meta"), 1)


def test_a_device_out_of_memory_is_one_message():
    with pytest.raises(DeviceError, match=r"\(HIP out of memory\); give the jobs more devices"), memory_told():
        raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")


class Libraries:
    """What stands in for torch's choice of a BLAS library, which a build for the CPU does not have."""

    def __init__(self, name):
        self.chosen = [SimpleNamespace(name=name)]

    def __call__(self, new=None):
        if new is not None:
            self.chosen.append(new if not isinstance(new, str) else SimpleNamespace(name=new.capitalize()))
        return self.chosen[-1]


@pytest.fixture
def tf32():
    """TF32 is on."""
    modules = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [module.allow_tf32 for module in modules]
    for module in modules:
        module.allow_tf32 = True
    yield
    for module, value in zip(modules, before, strict=True):
        module.allow_tf32 = value


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_products_have_full_precision_whatever_was_set_before(tf32, monkeypatch, device):
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", Libraries("Cublas"))
    for alternative in (False, True):
        with matmul(device, alternative):
            assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
        assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("name", "other"), [("Cublas", "Cublaslt"), ("Cublaslt", "Cublas"), ("Default", "Cublaslt")])
def test_the_alternative_on_devices_is_the_other_library(monkeypatch, name, other):
    libraries = Libraries(name)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", libraries)
    with matmul(CUDA, alternative=False):
        assert libraries().name == name
    with pytest.raises(ZeroDivisionError), matmul(CUDA, alternative=True):
        assert libraries().name == other
        raise ZeroDivisionError
    assert libraries().name == name


def test_the_alternative_on_the_cpu_is_to_do_without_onednn():
    before = torch.backends.mkldnn.enabled
    with matmul(CPU, alternative=True):
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled == before

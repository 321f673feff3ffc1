"""The simulated accelerator computes as the CPU, refuses the calls that a GPU refuses, and counts waits of
the host."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from quark_devkit.simulated_device import NAME, SimulatedDevice, SimulatedTensor, simulated_device


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulated_device() as made:
        yield made


def on_device(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A tensor of the CPU, and the same on the device."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x, x.to(NAME)


def test_gradients_and_products_are_those_of_the_cpu(device: SimulatedDevice) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 3))
    x, there = on_device(5, 8)
    twin = copy.deepcopy(layer).to(NAME)
    for model, values in ((layer, x), (twin, there)):
        model(values).square().sum().backward()
    assert all(isinstance(p, nn.Parameter) and p.device.type == NAME for p in twin.parameters())
    for parameter, other in zip(layer.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad.cpu())  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_products_in_the_lower_precision_as_on_the_cpu(device: SimulatedDevice, dtype: torch.dtype) -> None:
    x, there = on_device(4, 4)
    with torch.autocast("cpu", dtype):
        expected = (x @ x + 1, torch.nn.functional.linear(x, x))
    with torch.autocast(NAME, dtype):
        found = (there @ there + 1, torch.nn.functional.linear(there, there))
    for one, other in zip(expected, found, strict=True):
        assert other.dtype is one.dtype is dtype
        assert torch.equal(one, other.cpu())


def test_views_share_memory_and_in_place_operators_change_it(device: SimulatedDevice) -> None:
    x, there = on_device(4, 6)
    for values in (x, there):
        values[1:, ::2].mul_(3)
        values.diagonal().copy_(values.t()[0, :4])
        values[values > 1] = 0.5
        torch.add(values[0], 1, out=values[3])
    assert torch.equal(x, there.cpu())
    assert there.t().stride() == x.t().stride()
    assert there._version == x._version


def test_a_thread_of_its_own_can_put_tensors_there(device: SimulatedDevice) -> None:
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.arange(4).to(NAME)))
    thread.start()
    thread.join()
    assert made[0].tolist() == [0, 1, 2, 3]


def test_a_parameter_takes_other_data_and_its_copy_is_a_parameter(device: SimulatedDevice) -> None:
    layer = nn.Linear(2, 2).to(NAME)
    layer.weight.data = torch.ones(2, 2, device=NAME)
    copied = copy.deepcopy(layer)
    copied.weight.data.mul_(2)
    assert (layer.weight.tolist(), copied.weight.tolist()) == ([[1.0] * 2] * 2, [[2.0] * 2] * 2)
    assert isinstance(copied.weight, nn.Parameter)
    assert layer.to(torch.bfloat16).weight.dtype is torch.bfloat16


MIXED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a sum": lambda x, there: there + x,
    "a product": lambda x, there: there @ x,
    "a sum into the cpu": lambda x, there: x.add_(there),
    "a number of the device into the cpu": lambda x, there: x.add_(there.sum()),
    "a concatenation": lambda x, there: torch.cat([there, x]),
    "an index of the device into the cpu": lambda x, there: x[torch.zeros(1, dtype=torch.long, device=NAME)],
    "an index_select": lambda x, there: there.index_select(0, torch.tensor([0])),
    "a condition": lambda x, there: torch.where(x > 0, there, 0),
    "random numbers of a generator of the cpu": lambda x, there: torch.randn(2, device=NAME, generator=torch.Generator()),
}


@pytest.mark.parametrize("kind", MIXED)
def test_operators_of_both_devices_are_refused_and_the_place_is_named(kind: str, device: SimulatedDevice) -> None:
    with pytest.raises(RuntimeError, match=r"device.*tests/test_simulated_device.py:\d+ <lambda>"):
        MIXED[kind](*on_device(3, 3))


def test_numbers_and_indices_of_the_cpu_are_operands(device: SimulatedDevice) -> None:
    x, there = on_device(3, 3)
    rows = torch.tensor([2, 0])
    for one, other in (
        (x * torch.tensor(2.0), there * torch.tensor(2.0)),
        (x.clamp(min=0) + 1, there.clamp(min=0) + 1),
        (torch.where(x > 0, x, 0), torch.where(there > 0, there, 0)),
        (x[rows], there[rows]),
    ):
        assert torch.equal(one, other.cpu())


WAITS: dict[str, tuple[Callable[[Tensor], object], list[str]]] = {
    "a number": (lambda x: float(x.sum()), ["value"]),
    "a truth": (lambda x: bool((x > 0).any()), ["value"]),
    "a comparison": (lambda x: torch.equal(x, x), ["value"]),
    "a mask": (lambda x: x[x > 0], ["shape"]),
    "places": (lambda x: x.nonzero(), ["shape"]),
    "a list": (lambda x: x.tolist(), ["to host"]),
    "a copy to the host": (lambda x: x.cpu(), ["to host"]),
    "a copy of a list": (lambda x: torch.tensor([1.0, 2.0], device=NAME), ["from host"]),
    "indices of a list": (lambda x: x[[0, 1]], ["from host"]),
    "a copy from the host": (lambda x: torch.ones(2).to(NAME), ["from host"]),
    "a copy that does not wait": (lambda x: torch.ones(2).to(NAME, non_blocking=True), []),
    "a mask that is filled": (lambda x: x.masked_fill_(x > 0, 1.0), []),
    "values made there": (lambda x: torch.arange(3, device=NAME) + torch.full((3,), 2, device=NAME), []),
    "numbers of Python": (lambda x: torch.where(x > 0, x * 2, 0).clamp_(max=1), []),
}


@pytest.mark.parametrize("what", WAITS)
def test_what_makes_the_host_wait_is_counted_with_its_place(what: str, device: SimulatedDevice) -> None:
    work, kinds = WAITS[what]
    _, there = on_device(3, 3)
    device.waits.clear()
    work(there)
    assert [wait.kind for wait in device.waits] == kinds
    assert all(place.startswith("tests/test_simulated_device.py:") for place in device.counted())
    assert sum(device.counted("value", within="test_simulated").values()) == kinds.count("value")


def test_bytes_of_living_tensors_and_their_peak_are_counted(device: SimulatedDevice) -> None:
    before = device.bytes
    x = torch.zeros(1024, device=NAME)
    view = x[10:]
    y = x + 1
    assert device.bytes - before == 2 * 4096
    del x, y
    assert device.bytes - before == 4096  # the view has the memory of x
    assert device.peak - before == 2 * 4096
    free, total = torch.get_device_module(device.device).mem_get_info(device.device)
    assert total - free == device.bytes
    device.reset_peak()
    assert device.peak == device.bytes
    del view
    assert device.bytes == before


def test_a_tensor_says_its_values_and_is_no_array(device: SimulatedDevice) -> None:
    _, there = on_device(2)
    assert isinstance(there, SimulatedTensor)
    assert "SimulatedTensor(tensor([" in repr(there)
    assert f"{torch.ones((), device=NAME):.2f}" == "1.00"
    with pytest.raises(TypeError, match="can't convert"):
        there.numpy()
    assert there.numpy(force=True).shape == (2,)


def test_random_numbers_can_be_forked_while_it_is_registered() -> None:
    with simulated_device():
        state = torch.get_rng_state()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            torch.randn(3)
        assert torch.equal(torch.get_rng_state(), state)

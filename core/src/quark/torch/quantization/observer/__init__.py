"""``quark.torch.quantization.observer``: observers, which are in its module `observer` too."""

from __future__ import annotations

from quark.torch.quantization.observer.observer import ObserverBase as ObserverBase
from quark.torch.quantization.observer.observer import __dir__ as __dir__
from quark.torch.quantization.observer.observer import __getattr__ as __getattr__

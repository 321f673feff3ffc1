"""Quantization configurations for vLLM that serve checkpoints of quark.

The names of the configurations are ``quark_simulate``, ``quark_packed`` and ``quark_mixed``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

from quark.checkpoint.inspection import RuntimeSupport, inspect_checkpoint
from quark.checkpoint.layout_reader import quantization_block
from quark.checkpoint.provenance import KEY as PLUGINS
from quark.errors import CheckpointError, QuarkError, UnsupportedError
from quark.models.hf.custom_code import code_files
from quark.models.layers.layers_from_codes import Packed
from quark_vllm.methods import ServedAttention, ServedEmbedding, ServedExperts, ServedLinear
from quark_vllm.served_model import ServedModel, directory_of

__all__ = ["QuarkMixed", "QuarkPacked", "QuarkSimulate"]


@register_quantization_config("quark_simulate")
class QuarkSimulate(QuantizationConfig):
    """Serves checkpoints by unpacking their weights once, when vLLM loads the model.

    By default, vLLM uses this configuration for quark checkpoints that vLLM itself cannot load.
    """

    name: ClassVar[str] = "quark_simulate"
    keeps_codes: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._served: ServedModel | None = None
        self._hf_config: Any = None
        self._mapper: Any = None

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None, **_: Any) -> Any:
        """Return the name of this quantization method if it serves the checkpoint. Otherwise, return None."""
        if user_quant is None and hf_quant_cfg.get("quant_method") == "quark":
            support = _support_by_vllm(str(hf_config.name_or_path), None, _trusts_code(hf_config))
            chosen = None if support.loads else QuarkMixed if support.own_layers else QuarkSimulate
            return cls.name if cls is chosen else None
        return cls.name if user_quant == cls.name else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuarkSimulate:
        """Return a new configuration. The checkpoint is read later."""
        return cls()

    def get_name(self) -> Any:
        return self.name

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Store the name of the checkpoint that will be served."""
        self._hf_config = hf_config
        self._served = ServedModel(directory_of(model_name, revision), self.keeps_codes)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Store the mapping with which vLLM renames modules."""
        self.served.renamed = lambda name: (hf_to_vllm_mapper.apply_list([name]) or [name])[0]

    @property
    def served(self) -> ServedModel:
        """The served checkpoint."""
        assert self._served is not None
        self._served.fused = self.packed_modules_mapping
        self._served.trust_remote_code = _trusts_code(self._hf_config)
        return self._served

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Return a `WeightsMapper` that removes the tensors that vLLM cannot store."""
        names = "|".join(map(re.escape, self.dropped()))
        return WeightsMapper(orig_to_new_regex={re.compile(f"^(?:{names})$"): None} if names else {})

    def dropped(self) -> Iterable[str]:
        """Return the names of stored tensors that no layer of vLLM loads."""
        return self.served.unread()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method that computes a layer. For a float layer, this is vLLM's own method."""
        if isinstance(layer, LinearBase):
            parts = self.served.parts(prefix)
            return ServedLinear(self.served, parts) if parts else UnquantizedLinearMethod()
        if isinstance(layer, RoutedExperts):
            mixture = self.served.experts(prefix)
            return None if mixture is None else ServedExperts(self.served, mixture, layer.moe_config)
        if isinstance(layer, Attention):
            states = self.served.states(prefix.rpartition(".")[0])
            return None if states is None else ServedAttention(self, states)
        if isinstance(layer, VocabParallelEmbedding):
            is_ours = any(isinstance(m, Packed) for m in (self.served.embedding, self.served.head))
            return ServedEmbedding(self.served, is_embedding=not isinstance(layer, ParallelLMHead)) if is_ours else None
        return None


@register_quantization_config("quark_packed")
class QuarkPacked(QuarkSimulate):
    """Serves checkpoints with packed weights in memory. Each forward pass unpacks them."""

    name = "quark_packed"
    keeps_codes = True


@register_quantization_config("quark_mixed")
class QuarkMixed(QuarkSimulate):
    """Serves checkpoints in a mixed way. vLLM's kernels compute the layers that vLLM alone can load.

    All other layers are simulated. By default, vLLM uses this configuration for a quark checkpoint if vLLM
    alone can load some but not all of its layers.
    """

    name = "quark_mixed"

    def __init__(self, native: QuarkConfig) -> None:
        super().__init__()
        self._native = native

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuarkMixed:
        return cls(QuarkConfig.from_config(copy.deepcopy(config)))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        super().maybe_update_config(model_name, hf_config, revision)
        self._own_layers = _support_by_vllm(model_name, revision, _trusts_code(hf_config)).own_layers

    def dropped(self) -> Iterable[str]:
        # vLLM's own layers do not load the scales of the cache; `ServedAttention` has them already.
        return [*super().dropped(), *self.served.output_scales(self._own_layers)]

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        self._native.apply_vllm_mapper(hf_to_vllm_mapper)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        names: set[str] = set()
        if isinstance(layer, LinearBase):
            names = set(self.served.parts(prefix))
        elif isinstance(layer, RoutedExperts) and (mixture := self.served.experts(prefix)) is not None:
            names = {f"{prefix}.{name}" for name, module in mixture.named_modules() if isinstance(module, Packed)}
        is_computed = torch.get_default_dtype() in self._native.get_supported_act_dtypes()
        if names and is_computed and names <= set(map(self.served.renamed, self._own_layers)):
            self._native.packed_modules_mapping = self.packed_modules_mapping
            return self._native.get_quant_method(layer, prefix)
        return super().get_quant_method(layer, prefix)


def _trusts_code(hf_config: Any) -> bool:
    """Return whether the user of vLLM allows code that comes with the checkpoint.

    vLLM's own setting is not known before the model is built. Until then, code is allowed if vLLM has already
    run the code that defines ``hf_config``.
    """
    current = get_current_vllm_config_or_none()
    is_allowed = current is not None and current.model_config is not None and current.model_config.trust_remote_code
    return is_allowed or type(hf_config).__module__.startswith("transformers_modules.")


@lru_cache(maxsize=8)
def _support_by_vllm(model: str, revision: str | None, trust_remote_code: bool) -> RuntimeSupport:
    """Return how vLLM alone supports a checkpoint on this machine.

    If quark has not written the checkpoint and cannot read it, the result says that vLLM loads the
    checkpoint. The result says the same if the checkpoint needs code that is not allowed to run.

    Raises:
        QuarkError: Quark has written the checkpoint but cannot read it. The checkpoint is damaged, or a
            plugin is missing.
    """
    runtime = f"vllm_{'rocm' if current_platform.is_rocm() else 'cuda' if current_platform.is_cuda() else 'cpu'}"
    directory = directory_of(model, revision)
    try:
        inspection = inspect_checkpoint(directory, trust_remote_code=trust_remote_code)
        if inspection.damage:
            raise CheckpointError(f"the checkpoint is damaged: {'; '.join(inspection.damage)}. Export or download it again")
    except QuarkError as error:
        is_allowed = trust_remote_code or not code_files(directory / "config.json")
        needs_code = isinstance(error, UnsupportedError) and not is_allowed
        if PLUGINS in quantization_block(directory) and not needs_code:
            raise
        return RuntimeSupport(runtime, "vLLM", {})
    unknown = RuntimeSupport(runtime, "vLLM", {}, refusals=("quark has no rules for this layout",))
    return next((support for support in inspection.runtimes if support.runtime == runtime), unknown)

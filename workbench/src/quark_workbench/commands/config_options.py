"""The command-line options that say how each layer is quantized, and the configuration made from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from quark.errors import ConfigError
from quark_workbench.commands.given_options import given_algorithm_options, given_options, size_in_bytes

if TYPE_CHECKING:
    from torch import nn

    from quark.config.model import QConfig

__all__ = ["ConfigOptions", "without_named"]


@attrs.frozen(kw_only=True)
class ConfigOptions:
    """The command-line options that say how each layer is quantized.

    When an object is created, it reads the file of ``--template-file`` and registers the template.

    Attributes:
        template: The model type of the registered template; None without ``--template-file``.
    """

    scheme: Annotated[str | None, typer.Option(help="Scheme of all linear layers; `quark schemes` lists them.")] = None
    scheme_option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE for the scheme, such as block_size=32; `quark schemes NAME` shows its options. May be repeated."),
    ] = None
    algorithm: Annotated[
        list[str] | None, typer.Option(help="Algorithm to apply. May be repeated, in the order in which the algorithms run.")
    ] = None
    algorithm_option: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME.KEY=VALUE for an algorithm, such as gptq.damp_percent=0.05; `quark algorithms NAME` "
            "shows its options. May be repeated."
        ),
    ] = None
    kv_cache: Annotated[str | None, typer.Option(help="Scheme of the key-value cache, such as fp8.")] = None
    kv_cache_post_rope: Annotated[
        bool | None,
        typer.Option(
            "--kv-cache-post-rope/--no-kv-cache-post-rope",
            help="Quantize the keys after norms and the rotary embedding, as runtimes cache them. This is the default if the "
            "model allows it. The other option quantizes the output of the key projection. Needs --kv-cache.",
        ),
    ] = None
    attention_scheme: Annotated[str | None, typer.Option(help="Scheme of attention probabilities and queries, such as fp8.")] = None
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            help="Pattern of layers to leave in float, in addition to the layers that the model's template excludes; may be repeated."
        ),
    ] = None
    layer: Annotated[
        list[str] | None,
        typer.Option(
            help="PATTERN=SCHEME for some layers, such as lm_head=ptpc_fp8; may be repeated. A pattern that matches only layers "
            "that the template excludes quantizes these layers."
        ),
    ] = None
    separate_kv_scales: Annotated[
        bool, typer.Option("--separate-kv-scales", help="Keys and values keep separate scales; by default they share the larger scale.")
    ] = False
    calibrate_all_experts: Annotated[
        bool,
        typer.Option(
            "--calibrate-all-experts",
            help="Calibrate every expert of a mixture-of-experts model on every token, not only on the tokens that are routed to it.",
        ),
    ] = False
    share_fused_scales: Annotated[
        bool,
        typer.Option(
            "--share-fused-scales",
            help="Use one scale for layers that runtimes fuse (q/k/v, gate/up). Otherwise, if layers have one scale per tensor, "
            "vLLM requantizes the fused layers to their largest scale and loses precision.",
        ),
    ] = False
    activation_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for the activations of waiting calibration samples, such as 8GB; the default is half of the free memory. "
            "If the activations need more, each block runs twice."
        ),
    ] = None
    spill_directory: Annotated[
        str | None,
        typer.Option(help="Directory for block inputs of samples that do not fit into --activation-memory."),
    ] = None
    keep_prequantized: Annotated[
        bool,
        typer.Option(
            "--keep-prequantized/--no-keep-prequantized",
            help="Keep or dequantize the layers that MODEL stores quantized and that this run does not quantize. The default keeps them.",
        ),
    ] = True
    strict: Annotated[bool, typer.Option("--strict", help="Treat a pattern that matches no layer as an error, not a warning.")] = False
    template_file: Annotated[
        Path | None,
        typer.Option(help="JSON file with a template (names of modules, and patterns), for a model family without an installed template."),
    ] = None
    template: str | None = attrs.field(init=False)

    @template.default
    def _registered(self) -> str | None:
        from quark_workbench.template_file import register_template_file

        return None if self.template_file is None else register_template_file(self.template_file).model_type

    @property
    def named_layers(self) -> dict[str, str]:
        """A dictionary from each pattern of ``--layer`` to the name of its scheme."""
        return dict(_pair(text) for text in self.layer or [])

    def config_for(self, model: nn.Module, scheme: str | None = None) -> QConfig:
        """Return the configuration that the options and the template of the model's family define.

        Args:
            model: The float model. Its tensors can be on the meta device.
            scheme: Name of the scheme to use. If it is None, ``--scheme`` names the scheme. A selection of
                schemes (``--mixed``) passes the scheme from which it starts.

        Raises:
            ConfigError: No scheme is named, or an option cannot be read.
            UnknownNameError: There is no such scheme or algorithm.
        """
        from quark.models.plan.family import template_of

        scheme = self.scheme if scheme is None else scheme
        if scheme is None:
            raise ConfigError(
                "no scheme is given. Name a scheme, as in --scheme int4_wo_128 (`quark schemes` lists them), or several with --mixed"
            )
        template = template_of(model)
        if self.template not in (None, template.model_type):
            raise ConfigError(
                f"--template-file describes the model type '{self.template}', but this model has the type "
                f"'{template.model_type}'. Give the template file of this model's family, or change 'model_type' in the file"
            )
        fused = template.architecture.fused if self.share_fused_scales and template.architecture else None
        config = template.get_config(
            scheme=scheme,
            algorithm=self.algorithm or None,
            kv_cache_scheme=self.kv_cache,
            attention_scheme=self.attention_scheme,
            kv_cache_post_rope=self.kv_cache_post_rope,
            scheme_options=given_options("--scheme-option", self.scheme_option),
            algorithm_options=given_algorithm_options("--algorithm-option", self.algorithm_option),
            layer_config=self.named_layers or None,
            shared_scale_groups=None if fused is None else [list(group) for group in fused],
            exclude_layers=[*template.exclude_layers_name, *self.exclude] if self.exclude else None,
        )
        own = self.exclude or []
        return attrs.evolve(
            config,
            exclude=[*without_named([pattern for pattern in config.exclude if pattern not in own], list(self.named_layers), model), *own],
            separate_kv_scales=self.separate_kv_scales,
            calibrate_all_experts=self.calibrate_all_experts,
            activation_memory=None if self.activation_memory is None else size_in_bytes(self.activation_memory, "--activation-memory"),
            spill_directory=self.spill_directory,
            keep_prequantized_layers=self.keep_prequantized,
            strict=self.strict,
        )


def without_named(excluded: Sequence[str], named: Sequence[str], model: nn.Module) -> list[str]:
    """Return a template's exclusion patterns without the layers for which the user sets a scheme.

    A pattern of the user cancels exclusions only if the template excludes every layer that the pattern
    matches.

    Args:
        excluded: Exclusion patterns of the template.
        named: The patterns of layers for which the user sets a scheme.
        model: The model with the layers. Its tensors can be on the meta device.
    """
    from quark.base.names import matches
    from quark.models.layers.quantized_layers import counts_as
    from quark.models.plan.rules import first_match

    layers = [name for name, module in model.named_modules() if counts_as(module) is not None]
    floats = {name for name in layers if first_match(name, excluded) is not None}
    groups = [{name for name in layers if matches(name, pattern)} for pattern in named]
    wanted = {name for names in groups if names <= floats for name in names}
    kept: list[str] = []
    for pattern in excluded:
        own = [name for name in layers if matches(name, pattern)]
        kept += [pattern] if wanted.isdisjoint(own) else [name for name in own if name not in wanted]
    return kept


def _pair(text: str) -> tuple[str, str]:
    pattern, separator, scheme = text.rpartition("=")
    if not (pattern and separator and scheme):
        raise ConfigError(f"--layer {text!r} is not of the form PATTERN=SCHEME, such as '*.down_proj=fp8'")
    return pattern, scheme

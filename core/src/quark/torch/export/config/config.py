"""``quark.torch.export.config.config``: what exports are configured with."""

from __future__ import annotations

from quark.config.export import ExporterConfig, JsonExporterConfig, OnnxExporterConfig

__all__ = ["ExporterConfig", "JsonExporterConfig", "OnnxExporterConfig"]

"""Every template that this distribution registers passes the conformance suite."""

from quark_devkit import TemplateConformance
from quark_templates.plugin import quark_register_templates

globals().update(
    {f"Test_{r.name}": type(f"Test_{r.name}", (TemplateConformance,), {"subject": r.name}) for r in quark_register_templates()}
)

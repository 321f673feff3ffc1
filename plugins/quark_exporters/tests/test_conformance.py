"""Every layout that this distribution writes passes the conformance suite."""

from quark.testing import LayoutConformance
from quark_exporters.plugin import quark_register_exporters

WRITTEN = [record.name for record in quark_register_exporters() if record.exporter is not None]
globals().update({f"Test_{name}": type(f"Test_{name}", (LayoutConformance,), {"subject": name}) for name in WRITTEN})

"""Every layout that this distribution registers passes the conformance suite."""

from quark.testing import LayoutConformance
from quark_exporters.plugin import quark_register_exporters

globals().update({f"Test_{r.name}": type(f"Test_{r.name}", (LayoutConformance,), {"subject": r.name}) for r in quark_register_exporters()})

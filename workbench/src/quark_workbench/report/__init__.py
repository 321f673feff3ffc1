"""The report of a run, as JSON and as an HTML page that needs no other files."""

from quark_workbench.report.contents import Facts, contents_of, with_flags
from quark_workbench.report.files import read_report, write_contents, write_report
from quark_workbench.report.flags import flags_of
from quark_workbench.report.page import page
from quark_workbench.report.run_report import ReportOptions

__all__ = ["Facts", "ReportOptions", "contents_of", "flags_of", "page", "read_report", "with_flags", "write_contents", "write_report"]

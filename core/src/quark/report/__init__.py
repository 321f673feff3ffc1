"""The report of a run: what it measured, as JSON values and as one HTML page that opens offline."""

from quark.report.contents import Facts, contents_of, with_flags
from quark.report.flags import flags_of
from quark.report.page import page
from quark.report.run_report import ReportOptions
from quark.report.writing import read_report, write_contents, write_report

__all__ = ["Facts", "ReportOptions", "contents_of", "flags_of", "page", "read_report", "with_flags", "write_contents", "write_report"]

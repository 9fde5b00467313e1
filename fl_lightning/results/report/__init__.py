"""The report of runs: one HTML page that opens offline."""

from fl_lightning.results.report.files import read_group
from fl_lightning.results.report.page import write_report

__all__ = ["read_group", "write_report"]

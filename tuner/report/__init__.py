"""The report of a study: one HTML file that needs no network, made of sections.

A new section is one function of the kind `Section` in a file of its own, and one entry in `SECTIONS`.
"""

from tuner.report.data import ReportData, Section, collect
from tuner.report.page import SECTIONS, render_report, write_report

__all__ = ["SECTIONS", "ReportData", "Section", "collect", "render_report", "write_report"]

"""Report of a study: one self-contained HTML file, made of sections.

To add a section, write a function of type `Section` in a file of its own and add it to `SECTIONS`, or to `APPENDIX` if
it tells how the search went.
"""

from tuner.report.data import ReportData, Section, collect
from tuner.report.page import APPENDIX, SECTIONS, render_report, write_report

__all__ = ["APPENDIX", "SECTIONS", "ReportData", "Section", "collect", "render_report", "write_report"]

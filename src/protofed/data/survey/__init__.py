"""A look at data before anything is trained: what there is, what is wrong with it, and a page to show it."""

from protofed.data.survey.page import page
from protofed.data.survey.report import DataReport, survey

__all__ = ["DataReport", "page", "survey"]

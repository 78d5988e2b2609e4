"""The self-test: `verify` runs the same requests in every schedule and compares them bit for bit."""

from verbatim.verify.report import Report, Row
from verbatim.verify.schedules import NAMES, verify

__all__ = ["NAMES", "Report", "Row", "verify"]

"""The self-test: `verify` runs the same requests in every schedule and compares them bit for bit."""

from verbatim.verify.matrix import verify
from verbatim.verify.report import Report, Row
from verbatim.verify.schedules import NAMES

__all__ = ["NAMES", "Report", "Row", "verify"]

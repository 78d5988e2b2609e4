"""The promise, tried on a model and a machine: `verify` runs the same requests in every schedule."""

from verbatim.verify.matrix import verify
from verbatim.verify.report import Report, Row
from verbatim.verify.schedules import NAMES

__all__ = ["NAMES", "Report", "Row", "verify"]

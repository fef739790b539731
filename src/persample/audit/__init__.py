"""Does persample work on a model: exactly, with samples that keep apart, and at what price? Also `persample audit`.

>>> from persample.audit import audit_spec
>>> report = audit_spec("persample.audit.models:cnn", batch_size=4, repeats=0, memory=False)
>>> report.exact, report.independent
(True, True)
"""

from .costs import Cost
from .errors import AuditError
from .estimate import Estimate
from .independence import Seen
from .report import EXIT_CODES, Parameter, Report
from .run import STAGES, audit, audit_spec

__all__ = [
    "EXIT_CODES",
    "STAGES",
    "AuditError",
    "Cost",
    "Estimate",
    "Parameter",
    "Report",
    "Seen",
    "audit",
    "audit_spec",
]

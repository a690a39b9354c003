"""Audits of other trainers: the laws' verdicts on their losses and estimators, and their batches computed again.

In: functions of a released trainer in the signatures of our laws, or a file of tensors that a trainer wrote. Out: an
`AuditReport` that a table or JSON shows, or the first stage and row at which the numbers differ.
Begin with `report.audit`; `peers` has the adapters, `dump` the comparison of a batch.
"""

from fppo.studies.audit.report import Audited, AuditReport, audit

__all__ = ["AuditReport", "Audited", "audit"]

"""What the audit refuses with."""

from __future__ import annotations


class AuditError(Exception):
    """The audit could not be run: what was given is no model with a batch and one loss per sample."""

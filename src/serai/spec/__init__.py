"""The job file: read, override, validate."""

from serai.spec.difference import Difference, changed_spec_error, spec_difference
from serai.spec.document import JobSpec
from serai.spec.resolve import Provenance, ResolvedSpec, load_resolved, resolve
from serai.spec.schema import job_schema

__all__ = [
    "Difference",
    "JobSpec",
    "Provenance",
    "ResolvedSpec",
    "changed_spec_error",
    "job_schema",
    "load_resolved",
    "resolve",
    "spec_difference",
]

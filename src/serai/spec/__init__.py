"""The job file: read, override, validate."""

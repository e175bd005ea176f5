"""Thin adapters over the checkpoint engine for other frameworks."""

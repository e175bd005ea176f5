"""The agent: one process a node that owns the slab, writes, commits and retains. Imports no torch."""

"""The checkpoint engine. Public names are in ``serai``; importing this package loads nothing heavy."""

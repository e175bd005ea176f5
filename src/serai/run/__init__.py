"""Supervise: place, launch, watch, relaunch, drill, report."""

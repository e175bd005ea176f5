"""Measurements against peers, as ratios in one run on one machine."""

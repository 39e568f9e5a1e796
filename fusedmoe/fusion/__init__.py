"""Fusion: rules, the matcher, the planner, and plans."""

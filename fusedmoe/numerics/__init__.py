"""Numeric formats, recipes and rows sorted by expert, in plain torch."""

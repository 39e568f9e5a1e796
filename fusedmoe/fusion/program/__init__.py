"""A plan as a Python function, and the table of the plans of a chain."""

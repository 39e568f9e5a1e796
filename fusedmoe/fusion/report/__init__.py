"""The data of `explain()`, and its text."""

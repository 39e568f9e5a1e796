"""Activations of rows, and their derivatives."""

"""The version of fusedmoe."""

__version__ = "0.1.0"

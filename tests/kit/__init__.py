"""Tools for developers; `make` runs them."""

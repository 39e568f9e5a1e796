"""Support for models of other frameworks; no framework's module imports another's."""

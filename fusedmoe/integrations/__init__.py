"""Support for models of other frameworks: one module per framework, independent of the others."""

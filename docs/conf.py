"""Sphinx: the pages of this folder, and the API reference from the package's docstrings."""

import sys

from sphinx.ext.autodoc.mock import MockFinder

import fusedmoe

project = "fusedmoe"
author = "The fusedmoe contributors"
copyright = author  # Sphinx's name for it
version = release = fusedmoe.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "literal"  # `x` in a docstring is code, as in the pages

myst_heading_anchors = 3

# Integrations subclass torchtitan's modules, which need Triton. autodoc_mock_imports would replace these modules only
# while an integration is imported: Sphinx then imports the real modules, to read comments of base classes.
sys.meta_path.insert(0, MockFinder(["torchtitan"]))
autodoc_inherit_docstrings = False  # what a base class documents is not said again, nor what torch says of nn.Module
autodoc_member_order = "groupwise"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = False
napoleon_use_ivar = True  # a NamedTuple's fields would be described twice

html_theme = "furo"
html_title = f"fusedmoe {release}"

"""Flat-tensor functions, a folder an architecture. This room knows tensors and devices; it knows no op, no rule and no
recipe.
"""

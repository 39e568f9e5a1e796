"""Real models on `fusedmoe` without being rewritten: one module for each framework, none imported by another.

`gates` is what finds out which op a model's own activation is.
"""

"""Real models on `fusedmoe` without being rewritten: one module for each framework, none imported by another."""

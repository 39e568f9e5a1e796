"""Functions on flat tensors, with one folder per architecture. Nothing here depends on an op, a rule or a recipe."""

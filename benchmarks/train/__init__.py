"""Training of real models on real text: tokens per second, memory and losses of each experts implementation."""

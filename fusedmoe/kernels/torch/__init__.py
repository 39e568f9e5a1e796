"""The plain-PyTorch definition of every step, and its fallback on any device."""

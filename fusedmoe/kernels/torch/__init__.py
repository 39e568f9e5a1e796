"""Plain PyTorch: the meaning of every step, on any device. What no fused kernel takes runs here."""

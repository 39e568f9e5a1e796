"""Kernels that quantize, dequantize and transpose rows."""

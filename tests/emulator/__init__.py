"""An emulator of the GPU that the Hopper kernels are written for: it runs their PTX on a CPU. See docs/emulator.md."""

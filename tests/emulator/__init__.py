"""An emulator of the GPU that the Hopper kernels are written for: it runs their PTX on a CPU. See CONTRIBUTING.md.

`gpu.py` replaces the function that loads kernels, `host.py` compiles a kernel and links it to a CUDA runtime that
launches nothing, `ptx.py` and `program.py` make Python functions of its PTX, and `machine.py` runs the launch.

Limits:

- Approximate instructions have the results of NumPy. A product adds in fp64 and rounds to fp32 once per instruction;
  for FP8, the GPU keeps fewer bits of a sum.
- Named barriers count whole warps, also of a warp of which some lanes have ended.
- A product is computed when it is issued: a read of accumulators before ``wgmma.wait_group`` is not noticed.
- Launches run one after the other: programmatic dependent launch has no effect, and there are no streams and no graphs.
- A warp issues a tensor copy once, however many of its lanes are active, as Hopper does for the code of CuTe DSL.
- Reads by threads have no record: races between a read and a write of threads show only in the results. A load that may
  be outstanding at an arrival of its warp is found in the machine code instead (``tests/kit/machine_code.py``).
- ptxas is not part of it: wrong code of ptxas shows on a GPU only.
"""

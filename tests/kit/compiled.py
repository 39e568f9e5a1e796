"""Kernels compiled without a GPU, kept between runs by their sources: the machine code of each launch."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
import zlib
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest

from fusedmoe.kernels.build.cache_key import key
from kit import machine_code
from kit.kept import contents, kept

USAGE = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)")
SECTION = re.compile(r"^\.text\.(\w+):\n", re.MULTILINE)


class Launch(NamedTuple):
    """The machine code of a launch, and the registers and bytes of stack that a thread takes."""

    code: machine_code.Code
    registers: int
    stack_bytes: int

    @property
    def opcodes(self):
        return [instruction.opcode for instruction in self.code.instructions]

    def matching(self, pattern):
        """Return the opcodes that begin with a regular expression, in order."""
        return [opcode for opcode in self.opcodes if re.match(pattern, opcode)]


def compiled(kernel, *parts):
    """Return the launches of a kernel by name. ``parts``: what determines its code besides its sources."""
    tools = tool("nvdisasm"), tool("cuobjdump")
    found = kept(["SASS with usage", key(kernel), *contents(*tools), *parts], lambda: _disassembled(kernel, *tools))
    name = re.compile(rf"kernel_cutlass_(\w+?)_{type(kernel).__name__}")
    return {
        name.match(function)[1]: Launch(machine_code.parse(sass), registers, stack_bytes)
        for function, registers, stack_bytes, sass in json.loads(zlib.decompress(found))
    }


def tool(name):
    """Path of a tool of the CUDA toolkit: on PATH, or of its package on PyPI."""
    found = shutil.which(name) or next(Path(sys.prefix).glob(f"lib/*/site-packages/nvidia/*/bin/{name}"), None)
    if found is None:
        pytest.skip(f"no {name}: pip install nvidia-cuda-{name}, or fusedmoe[dev]")
    return str(found)


def compile_keeping(kernel, kind, folder):
    """Compile a kernel, and have the compiler write its PTX or its cubin into a folder."""
    from cutlass import cute

    plain = cute.compile

    def keeping(*args, options):
        return plain(*args, options=f"{options} --keep-{kind} --dump-dir {folder}")

    with patch.object(cute, "compile", keeping), warnings.catch_warnings():
        warnings.simplefilter("error")  # the DSL warns before it drops a name
        return kernel.compile()


def _disassembled(kernel, nvdisasm, cuobjdump):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(compile_keeping(kernel, "cubin", folder).__cubin__)
        sass, usage = (
            subprocess.run([*command, file], capture_output=True, text=True, check=True).stdout
            for command in ([nvdisasm, "-c", "-hex"], [cuobjdump, "-res-usage"])
        )
    numbers = {function: map(int, found) for function, *found in USAGE.findall(usage)}
    _, *sections = SECTION.split(sass)
    launches = [
        (function, *numbers[function], text) for function, text in zip(sections[::2], sections[1::2], strict=True)
    ]
    return zlib.compress(json.dumps(launches).encode())

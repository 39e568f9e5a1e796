"""The protocol of a kernel: its compile-time parameters, and how it compiles."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Compiled", "Kernel"]


class Compiled(Protocol):
    """The result of ``cute.compile``."""

    def export_to_c(self, object_file_path: str, function_name: str) -> None: ...


class Kernel(Protocol):
    """A kernel with all its compile-time parameters: a frozen dataclass, hashable and picklable."""

    @property
    def symbol(self) -> str:
        """A unique C identifier: ``sm90_ragged_m_bf16_bk_swiglu_128x192pp_c21``."""

    @property
    def arch(self) -> str:
        """The target architecture: ``sm_90a``."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Dotted names of the modules whose source determines the object; a package includes all its modules.

        The sources are read, not imported.
        """

    def compile(self) -> Compiled:
        """Compile without a GPU: ``cute.compile(function, *fake_arguments, stream, options=...)``.

        The options must contain ``--enable-tvm-ffi`` and ``--gpu-arch`` with :attr:`arch`: the loader of objects does
        not check the architecture. The stream is ``make_fake_stream(use_tvm_ffi_env_stream=True)``.
        """

    def __hash__(self) -> int: ...

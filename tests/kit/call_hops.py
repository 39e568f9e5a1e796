"""The way of a call through the files of the package, as `sys.setprofile` sees it.

A *hop* is a frame of another file than the frame before it. Returns are no hops. A hop *goes back up* if its file was
visited before, or if the layer of the file is above that of the file that called it; docs/architecture.md lists the
layers. The function that is generated for a plan counts as the file ``program``, of the layer of `fusedmoe.fusion`.
Frames inside the stand-ins of kernels do not count.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import fusedmoe

PACKAGE = Path(fusedmoe.__file__).parent
STAND_INS = str(Path(__file__).parent / "sm90_stand_ins.py")
PROGRAM = "program"
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


class Hop(NamedTuple):
    file: str
    function: str
    goes_back_up: bool

    def __str__(self):
        return f"{'^' if self.goes_back_up else ' '} {self.file}: {self.function}"


def layers() -> dict[str, int]:
    """Each name of the page's list with its layer, 0 being the top."""
    text = PAGE.read_text("utf-8").partition("```text\nlayers, from top to bottom\n")[2].partition("```")[0]
    return {name: number for number, line in enumerate(text.splitlines()) for name in line.split()}


def file_of(code):
    """The file of a frame's code in the package; None outside of it."""
    if code.co_filename.startswith("<fusedmoe program"):
        return PROGRAM
    path = Path(code.co_filename)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None


def is_part(code):
    """Whether a frame is a part of a function: a comprehension, or a module's own code."""
    return code.co_name.startswith("<") and code.co_name != "<lambda>"


def frames_of(call):
    """The file, the function and the caller's file of each frame of the package in a call."""
    found, stand_ins = [], 0

    def note(frame, event, _):
        nonlocal stand_ins
        if event not in ("call", "return"):
            return
        if frame.f_code.co_filename == STAND_INS:
            stand_ins += 1 if event == "call" else -1
        elif event == "call" and not stand_ins and (file := file_of(frame.f_code)) and not is_part(frame.f_code):
            caller = frame.f_back
            while caller is not None and file_of(caller.f_code) is None:
                caller = caller.f_back
            found.append((file, frame.f_code.co_name, None if caller is None else file_of(caller.f_code)))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def hops_of(call):
    """The hops of a call."""
    layer = {**layers(), PROGRAM: layers()["fusion"]}
    hops, files = [], set()
    for file, function, caller in frames_of(call):
        if hops and hops[-1].file == file:
            continue
        above = caller is not None and layer[file.split("/")[0]] < layer[caller.split("/")[0]]
        hops.append(Hop(file, function, file in files or above))
        files.add(file)
    return hops

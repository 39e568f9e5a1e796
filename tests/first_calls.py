"""A process in which no call has made the tensors that calls keep, see `fusedmoe.lasting`."""

from fusedmoe import torch_handles
from fusedmoe.kernels.sm90 import launch, one_group, slot_functions
from fusedmoe.kernels.sm100 import calls
from fusedmoe.lasting import unread

KEPT = ((launch, "_tile_counters"), (one_group, "_tables"), (slot_functions, "_no_scales"), (calls, "_ones"))
# a launch that is bound to its arguments keeps such tensors too
BOUND = ((torch_handles, "_chains"), (torch_handles, "_plans"), (torch_handles, "_last_calls"))


def forget_kept_tensors(monkeypatch):
    """Until the end of a test, calls of compiled graphs make these tensors anew."""
    for module, name in (*KEPT, *BOUND):
        monkeypatch.setattr(module, name, {})
    unread.cache_clear()

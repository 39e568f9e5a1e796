"""A process in which no call has made the tensors that calls keep, see `fusedmoe.lasting`."""

from fusedmoe.kernels.sm90 import launch, one_group, slot_functions
from fusedmoe.kernels.sm100 import calls
from fusedmoe.lasting import unread

KEPT = ((launch, "_tile_counters"), (one_group, "_tables"), (slot_functions, "_no_scales"), (calls, "_ones"))


def forget_kept_tensors(monkeypatch):
    """Until the end of a test, calls make these tensors anew."""
    for module, name in KEPT:
        monkeypatch.setattr(module, name, {})
    unread.cache_clear()

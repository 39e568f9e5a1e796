"""`Softcap` for fusedmoe, and fusion rules that apply it in the buffer that the layer before it has written."""

from fusedmoe_softcap.op import DSoftcap, Softcap
from fusedmoe_softcap.rules import DgradOfSoftcap, GemmSoftcap

RULES = [GemmSoftcap, DgradOfSoftcap]

__all__ = ["RULES", "DSoftcap", "DgradOfSoftcap", "GemmSoftcap", "Softcap"]

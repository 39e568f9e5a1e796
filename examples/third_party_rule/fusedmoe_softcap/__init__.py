"""`Softcap` for fusedmoe, and fusion rules that apply it in place to the output of the preceding layer."""

from fusedmoe_softcap.op import DSoftcap, Softcap
from fusedmoe_softcap.rules import DgradOfSoftcap, GemmSoftcap

RULES = [GemmSoftcap, DgradOfSoftcap]

__all__ = ["RULES", "DSoftcap", "DgradOfSoftcap", "GemmSoftcap", "Softcap"]

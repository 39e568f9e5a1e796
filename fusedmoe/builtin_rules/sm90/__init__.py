"""The fusion rules for sm_90 (Hopper), one file per fusion or op family."""

"""The grouped products for Hopper: main loops, loads, and the tile scheduler."""

"""``fusedmoe verify``: checks the built-in fusion rules on this machine's GPU, through small modules.

`cases` has the cases and bounds as data, `calls` makes their modules and tensors, `checks` runs a case, `rules`
collects the outcomes by rule, as a table and as JSON. `machine` is the interface to the GPU.
"""

"""``fusedmoe demo``: train a byte-level Mixture-of-Experts transformer on the reference text that CPython ships.

``options`` (the job), ``data`` (the text), ``model``, ``train`` (optimizer, loop, evaluation, checkpoint) and
``command`` (the printed text and the written files). `python -m benchmarks.demo` trains a job under several recipes.
"""

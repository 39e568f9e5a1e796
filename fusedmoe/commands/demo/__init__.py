"""``fusedmoe demo``: train a byte-level Mixture-of-Experts transformer on the reference text that CPython ships.

``run`` trains one model: ``options``, ``data``, ``model``, ``train``, ``evaluate``, ``checkpoint``, ``progress`` and
``report`` are its parts. ``compare`` trains one model per numeric recipe; ``comparison`` reports the results.
"""

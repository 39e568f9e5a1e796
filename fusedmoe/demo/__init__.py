"""The main job, ``fusedmoe demo``: train a byte-level Mixture-of-Experts transformer on text that every Python ships.

``options`` what can be chosen, ``data`` the text, ``model`` the network, ``train`` the loop, ``evaluate`` what it is
worth, ``checkpoint`` the file it goes on from, ``progress`` and ``report`` what a person sees, ``run`` all of it in
order; ``compare`` runs it once for each numeric recipe, and ``comparison`` is what comes of that.
"""

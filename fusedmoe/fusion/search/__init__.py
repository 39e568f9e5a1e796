"""The search for the cheapest covering of a chain by rules."""

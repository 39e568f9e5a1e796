"""Checks, errors, logging, settings of the process and facts about the machine: every other folder may import it."""

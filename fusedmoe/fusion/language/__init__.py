"""The language of rules: patterns, their match, and the set of rules."""

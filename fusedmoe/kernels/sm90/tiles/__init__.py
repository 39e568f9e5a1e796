"""The tile configurations, and the choice among them."""

"""Ordered rules: the first that has something to say decides."""

"""Recipes that make the demo model family (``python -m training --help``)."""

"""Recipes for drafters with weights of their own, for any target (``drafthouse train``)."""

"""Thin Ray actors around the engine: target worker, draft worker, channels, life cycle."""

"""Requests from their acceptance to their end: who prepares, waits, runs."""

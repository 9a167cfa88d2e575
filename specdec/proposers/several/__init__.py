"""Several drafters in one engine, one of them for each request."""

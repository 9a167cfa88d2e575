"""From tokens to the text that streams show."""

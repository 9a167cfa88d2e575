"""The formats in which drafters are published: read and written as they are."""

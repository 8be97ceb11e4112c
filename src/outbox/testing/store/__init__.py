"""The store contract's cases, one file for each group."""

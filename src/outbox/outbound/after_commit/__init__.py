"""After the commit: what waits for the end of a caller's transaction, and is forgotten if it rolls back."""

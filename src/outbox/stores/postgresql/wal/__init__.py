"""The write-ahead log as a relay's feed: rows leave in commit order, from a logical replication slot."""

"""What strangers can send, insert and request: it stops no queue."""

"""What edda's outbox documents."""

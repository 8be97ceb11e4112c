"""What faststream-outbox documents."""

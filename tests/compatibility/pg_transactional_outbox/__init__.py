"""What pg-transactional-outbox documents."""

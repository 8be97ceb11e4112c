"""What kbairak's outbox documents, delayed retries included."""

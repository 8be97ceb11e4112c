"""Testing: what a test of an application with an outbox needs, real servers included."""

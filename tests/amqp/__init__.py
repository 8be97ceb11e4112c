"""AMQP as a test speaks it: a peer that does what a real broker seldom does."""

"""What TransportContract is made of: the promises of a transport, one file per subject."""

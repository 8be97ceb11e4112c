"""Sessions: the transaction of a caller, behind one interface, on any session of SQLAlchemy or driver's connection."""

"""Mutants: the library broken on purpose, one promise at a time, and the test that notices.

Each patch breaks one thing that would lose, repeat or delay messages. Its first lines name the promise and the test
that must fail. `make mutants` proves that each of them does.
"""

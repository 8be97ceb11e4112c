"""Matrix: the tests on each version that people run, one table, and the page that tells what was run.

`python -m tests.matrix` runs every version, `python -m tests.matrix rabbitmq-4.3` one. Servers and Pythons that this
machine lacks come from distributions, unpacked as trees in the cache that the tests keep their servers in; tests run
inside the tree, in namespaces of their own, so that nothing stays mounted or running.
"""

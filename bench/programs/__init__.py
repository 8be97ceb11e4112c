"""Programs: workers and emitters of each library, run as processes of their own and spoken to by lines.

The peers live in an environment of their own, so nothing here imports the library except `ours`.
"""

"""Typing: what type checkers accept of typical code, and what they reject."""

"""The words: values and protocols that every other part shares. No input or output happens here."""

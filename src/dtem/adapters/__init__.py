"""Adapters: the trained files, as in PEFT. Saving, loading, the Hub, averaging, and those that come along."""

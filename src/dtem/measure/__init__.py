"""Counting, timing and keeping what was measured."""

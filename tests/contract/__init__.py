"""What every adapter and every method promises. A new host is one line in `hosts.py`, a new method none."""

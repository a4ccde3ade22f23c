"""Training: what learns (`plans`), how a run goes (`loop`), where it stands (`checkpoint`), its settings (`config`)."""

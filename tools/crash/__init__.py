"""Power cuts and kills, simulated and real: does L2 keep its promises? `python -m crash`."""

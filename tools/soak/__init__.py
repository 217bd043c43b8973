"""Long runs: the cache against a plain model, and a real agent under traffic for half an hour."""

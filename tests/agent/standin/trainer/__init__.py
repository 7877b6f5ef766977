"""A trainer without torch that keeps the contract of files and signals, or breaks it when told to."""

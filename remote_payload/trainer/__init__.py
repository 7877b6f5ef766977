"""The trainer exists to turn a frozen language model's own answers into a DFlash drafter, on whatever devices it is given."""

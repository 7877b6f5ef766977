"""Turns a frozen language model's own answers into a DFlash drafter on whatever devices there are."""

"""The workstation side of pctrun: it decides, speaks SSH and prints; nothing of it runs in a container."""

"""What must happen inside the container happens here: standard library only, Python >= 3.9."""

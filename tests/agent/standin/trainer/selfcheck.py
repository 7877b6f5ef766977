"""A deploy runs this to prove that the release works with the run's interpreter."""

import platform

import trainer.__main__
import trainer.describe

if __name__ == "__main__":
    last = trainer.__main__.LAST_PHASE
    print(f"stand-in {trainer.describe.VERSION} {last} python {platform.python_version()}")

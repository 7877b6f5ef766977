"""Why: a deploy imports this to prove that the release works with the run's interpreter."""

import platform

import trainer.__main__
import trainer.config

print(f"stand-in {trainer.config.VERSION} {trainer.__main__.LAST_PHASE} python {platform.python_version()}")

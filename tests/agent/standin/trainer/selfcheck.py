"""Why: a deploy runs this to prove that the release works with the run's interpreter."""

import platform

import trainer.__main__
import trainer.config

if __name__ == "__main__":
    print(
        f"stand-in {trainer.config.VERSION} {trainer.__main__.LAST_PHASE} python {platform.python_version()}"
    )

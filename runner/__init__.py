"""From a manifest to a training pipeline: each rank builds, loads and trains its own stages."""

import os
import signal

# Importing torch takes seconds, in which Ctrl-C would print a traceback for each rank. Processes that `runner launch`
# started die of it without a word instead; once there is something to say, `runner.life` handles it.
if os.environ.get("RUNNER_AGENT") in (str(os.getpid()), str(os.getppid())):
    signal.signal(signal.SIGINT, signal.SIG_DFL)

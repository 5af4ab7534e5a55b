"""On a rank's PYTHONPATH: notes every weight file that the process opens, in OPENED_LOG.RANK."""

import os
import sys


def _note(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[0].endswith(".safetensors"):
        with open(f"{os.environ['OPENED_LOG']}.{os.environ['RANK']}", "a") as log:
            log.write(arguments[0] + "\n")


if "RANK" in os.environ and "OPENED_LOG" in os.environ:
    sys.addaudithook(_note)

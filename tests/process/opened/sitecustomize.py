"""On a rank's PYTHONPATH: notes every weight file that the process opens, in OPENED_LOG.RANK."""

import os
import sys


def _note(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
        path = os.fspath(arguments[0])
        if path.endswith(".safetensors"):
            with open(f"{os.environ['OPENED_LOG']}.{os.environ['RANK']}", "a") as log:
                log.write(path + "\n")


if "RANK" in os.environ and "OPENED_LOG" in os.environ:
    sys.addaudithook(_note)

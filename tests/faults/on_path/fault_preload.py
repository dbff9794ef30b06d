"""Imported by the warm process. While `$FAULTS/slow_preload` is there the import waits, with a child that left the session."""

import os
import subprocess
import time
from pathlib import Path

control = Path(os.environ["FAULTS"])
if (control / "slow_preload").exists():
    subprocess.Popen(["sleep", "4242"], start_new_session=True)
    (control / "preloading").touch()
    while (control / "slow_preload").exists():
        time.sleep(0.05)

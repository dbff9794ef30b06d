"""Takes long to import, and starts a process meanwhile."""

import subprocess
import time

subprocess.Popen(["sleep", "300"], start_new_session=True)
time.sleep(300)

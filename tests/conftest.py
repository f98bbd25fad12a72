"""What every test relies on, before torch is loaded anywhere."""

from __future__ import annotations

import os
import signal

# Ranks share few cores: a thread pool in each of them would only get in the way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Gloo otherwise resolves the host's name, which sandboxes often cannot.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# A script that starts the tests in the background (`make test &`) has them ignore Ctrl-C,
# which every process they start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

"""Processes that fork, as a DataLoader with workers does, while threads of ours are at work.

In the child Python lets go of what other threads held. It must not be anything that waits: for a lock, or for a thread
that is not there.
"""

from __future__ import annotations

import os
import threading

no_fork = threading.Lock()
"""Held by a thread amid something that a child could not let go of. Forks wait for it, so only for moments."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)

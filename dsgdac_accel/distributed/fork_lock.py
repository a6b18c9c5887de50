"""Keeps a fork, such as that of a DataLoader with workers, from happening while a thread is in a critical moment.

In the child, Python destroys the objects of the other threads. No destructor may wait for a lock, or for a thread that
does not exist in the child.
"""

from __future__ import annotations

import os
import threading

no_fork = threading.Lock()
"""Held by a thread while it owns something that a child could not destroy. Hold it briefly: forks wait for it."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)

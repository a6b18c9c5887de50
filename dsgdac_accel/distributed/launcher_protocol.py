"""Messages between a worker and `dsgdac launch`: exit statuses, and keys in the rendezvous store."""

EXIT_STOPPED = 75
"""Exit status of a worker that a signal stopped, with a complete checkpoint to resume from (EX_TEMPFAIL)."""

RUN_ID = "dsgdac"
"""Value of TORCHELASTIC_RUN_ID in workers that `dsgdac launch` started."""

WAITING = "dsgdac_accel/waiting"
"""Key in the store; `WAITING/RANK` is set by a worker that is about to wait for all others to connect."""

CONNECTED = "dsgdac_accel/connected"
"""Key in the store, set when all workers are connected: from then on they notice a lost worker by themselves."""

DROPPED = "dsgdac_accel/dropped"
"""Key in the store; `DROPPED/RANK` is set when the others continue without a worker. The launcher kills it."""

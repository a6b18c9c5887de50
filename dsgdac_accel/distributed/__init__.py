"""The workers of a run: process groups with named collectives, failure detection, and stopping on a signal.

When a neighbor dies, its connections break, or nothing arrives within `timeout` seconds. The exchange or
the collective that waits for it raises a transport error in `WorkerGroup.guarded`. `FailureDetector` recognizes the
error and finds out which worker is gone, from the other workers' reports in the rendezvous store and from the process
table. Then the group raises `WorkerLostError`, which names the worker and the step. This worker ends, which breaks its
own connections, so the others end likewise, one after the other, and quote the first report.
"""

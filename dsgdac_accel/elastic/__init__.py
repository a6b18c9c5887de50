"""Continuing without a lost worker (`GossipConfig(on_worker_loss="continue")`), and `dsgdac launch`.

No other package of the library imports this one. `distributed` finds `recovery.ContinueWithSurvivors` by the entry
point `dsgdac.on_worker_loss`, and the command line finds `launch_command` by `dsgdac.commands`.
"""

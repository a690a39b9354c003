"""Training runs by the verbs of tinker's protocol: forward, forward_backward, optim_step, sampling, saving.

In: requests' data as values (`runs.Datum`). Out: new runs, log-probs, metrics. The verbs are pure functions of a run.
Begin with `runs.forward_backward`; `losses` has the losses by name, `graphs` those that clients send.
"""

"""Plan a run without tensors: memory by kind, bytes sent, and time, on a mesh of any size.

In: a model's config, a mesh, batch sizes and a GPU's numbers, or a run's settings. Out: a `Plan` of one rank, with
changes that would make it fit. The stages run on meta tensors, and are counted operation by operation.
Begin with `plan.plan`; `search` tries meshes, `measured` runs a planned stage on real tensors.
"""

"""Planning of a run without tensors: memory by kind, bytes on the wire, time; on a mesh of any size.

In: a model's config, a mesh, batch sizes and a GPU's numbers, or a run's settings. Out: a `Plan` of one rank, with what
would make it fit. The stages run on meta tensors, and are counted operation by operation.
Begin with `plan.plan`; `search` tries meshes, `measured` compares with real tensors.
"""

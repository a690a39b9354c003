"""What a run will need, planned without tensors: memory by kind, bytes on the wire, time; on a mesh of any size."""

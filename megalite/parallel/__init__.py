"""The mesh, `Shard`, tensor-parallel layers, the loss, initial weights. No DeepSpeed."""

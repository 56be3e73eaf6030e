"""Makes samples of documents: order, packing, mixes, stages."""

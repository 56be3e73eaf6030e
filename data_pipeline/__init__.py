"""Turns text into training batches. This package uses integers, numpy and files, and nothing else of megalite.

One file per step:

    sources/     files, folders, globs, JSONL, `datasets`    -> pieces of documents, read as a stream
    tokenizer    text -> a tokenizer.json of byte-level BPE; tokenizer_reading: its folder, as transformers reads it
                 -> ids, vocabulary, end-of-document id
    prepare/     pieces -> token ids on all cores            -> PREFIX.bin, PREFIX.idx, PREFIX.meta.json
    indexed      Megatron's .bin/.idx pair, bit for bit      -> memory-mapped documents
    token_cache  corpora that lie elsewhere              -> copies here, proven by their digests
    dataset      documents -> packed blocks                  -> sample(k), pure in (fingerprint, seed, k)
    packing_plan documents -> which of them share a sample   -> PREFIX.pack-*.npy, by `megalite data pack`
    best_fit     documents, plan -> whole documents          -> sample(k) of `data.packing: best_fit`
    mix          samples of several sources -> one stream    -> k to (source, j), by weights that stages may change
    audit        samples -> documents, and back              -> what a sample holds, which samples hold a document
    loader       samples -> the micro-batches of one rank    -> numpy arrays, prefetched by a thread;
                 one document -> overlapping windows         -> each token scored once in evaluation

Nothing here imports torch; `tokenizers`, `datasets` and `transformers` are imported inside the functions that
use them, so that importing a module of this package costs only numpy and pydantic.
"""

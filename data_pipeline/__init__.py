"""Text in, training batches out: the room that knows integers, numpy and files, and nothing else of megalite.

The way through it, one file per step:

    sources/     files, folders, globs, JSONL, `datasets`    -> pieces of documents, read as a stream
    tokenizer    train or inspect a tokenizer.json           -> vocabulary, end-of-document id
    prepare      pieces -> token ids on all cores            -> PREFIX.bin, PREFIX.idx, PREFIX.meta.json
    indexed      Megatron's .bin/.idx pair, bit for bit      -> memory-mapped documents
    samples      documents -> packed blocks                  -> sample(k), pure in (fingerprint, seed, k)
    order        the permutation of an epoch, computed       -> integers
    batches      samples -> the micro-batches of one rank    -> numpy arrays, prefetched by a thread

Nothing here imports torch; `tokenizers`, `datasets` and `transformers` are imported inside the functions that
use them, so that importing a module of this room costs only numpy.
"""

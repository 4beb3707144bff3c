"""From sentences to batches: which pairs, which ids, which batch comes next.

Read the modules in this order; each imports only from those above it:

    keys           sentences met before, where there are too many to remember
    splits         which split a pair belongs to, so that nothing leaks
    tatoeba_ja_en  where the default sentences come from: a TFDS builder
    sources        raw pairs from a data set by name or from files
    corpus         clean pairs; every drop is counted
    tokenizer      text <-> ids
    shards         ids on disk, a million pairs at a time
    encoded        the ids of a corpus, computed once
    buckets        which lengths share a shape
    batches        which rows come together, in which order

A model never enters this package.
"""

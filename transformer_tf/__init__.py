"""The translation Transformer of "Attention Is All You Need" (2017) in Keras 3.

Read the modules in this order; each imports only from those above it:

    config         what size, how long
    flags          how a field becomes a flag and a key of a file
    run_directory  where a run keeps what
    attention      what happens inside a station                  paper 3.2
    layers         what is a station                              paper 3.1 3.3 3.5
    model          what is the mountain                           paper 3.1 3.4
    training       how it learns                                  paper 5.1-5.4
    checkpoints    what survives a crash                          paper 6.1
    decoding       how it chooses words                           paper 6.1
    translator     text in, text out; the SavedModel
    scores         how good the translations are
    reporting      what a run says while it trains

Shape letters, the same everywhere:

    B  batch               S  source length       T  target length
    D  model width         H  heads               K  width of one head
    V  vocabulary          W  beam                N  B * W, hypotheses side by side

Masks are boolean and explicit: True = may look. No layer emits or expects an implicit
Keras mask.
"""

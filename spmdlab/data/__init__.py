"""Data, stage by stage: ingest, clean, split, examples, batches.  NumPy and Grain only.

Each stage is a function that returns its result and a `spmdlab.data.lineage.Lineage` record.
"""

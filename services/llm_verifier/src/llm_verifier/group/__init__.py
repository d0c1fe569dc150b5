"""A verifier group: TP x PP rank processes that are one decoder. Rank 0 leads; the others follow its commands."""

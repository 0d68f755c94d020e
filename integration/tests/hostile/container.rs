//! Root inside a container that attacks exec, probes and the files that the node reads for it.

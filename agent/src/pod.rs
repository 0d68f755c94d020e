//! Pods on this node: one task each, level-triggered, newest wish wins.

//! Removal marks: a name with the prefix `-` requests the removal of that annotation, mount destination,
//! device path, variable, namespace or sysctl.

/// The name without the mark, and whether it was marked.
pub(crate) fn unmark(name: &str) -> (&str, bool) {
    name.strip_prefix('-').map_or((name, false), |bare| (bare, true))
}

/// The name with the mark.
pub(crate) fn mark(name: &str) -> String {
    format!("-{name}")
}

/// The name of a variable in the form `NAME=value`.
pub(crate) fn variable(entry: &str) -> &str {
    entry.split_once('=').map_or(entry, |(name, _)| name)
}

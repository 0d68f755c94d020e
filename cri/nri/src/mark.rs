//! A name that begins with `-` asks for the removal of what the rest names: an annotation, a mount's
//! destination, a device's path, a variable, a namespace, a sysctl.

/// The name without its mark, and whether it had one.
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

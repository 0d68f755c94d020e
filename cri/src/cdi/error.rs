//! Errors of CDI.

use std::path::PathBuf;

/// Reasons why a device is not available.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CdiError {
    #[error("{0:?} is not a qualified device name; it must be vendor/class=name")]
    Name(String),
    #[error("unresolvable CDI devices {}{}", .devices.join(", "), notes_in_brackets(.notes))]
    Unresolvable { devices: Vec<String>, notes: Vec<String> },
    #[error("CDI device {device} needs {what}, which this runtime does not support")]
    Unsupported { device: String, what: &'static str },
    #[error("cannot stat the device node {}", .path.display())]
    Node { path: PathBuf, source: std::io::Error },
    #[error("the CDI device node {} is not a device", .path.display())]
    NoNode { path: PathBuf },
    #[error("CDI hook {0:?} is not an OCI hook")]
    Hook(String),
}

/// Notes about unusable files: the device can be in one of them.
fn notes_in_brackets(notes: &[String]) -> String {
    if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) }
}
